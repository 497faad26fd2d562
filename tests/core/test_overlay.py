"""The overlay: our files win, every other module is upstream's, and each class exists once."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import megatron.core

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "megatron" / "core"

SHADOWED = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.transformer.dot_product_attention",
)


def run_python(code: str, *, cwd: Path, path: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_path_is_ours_then_exactly_one_upstream():
    ours, upstream = megatron.core.__path__
    assert Path(ours) == OURS
    assert (Path(upstream) / "parallel_state.py").is_file()
    assert not (OURS / "parallel_state.py").exists()


def test_upstream_init_ran_in_our_namespace():
    assert megatron.core.__version__
    assert megatron.core.ModelParallelConfig.__module__ == "megatron.core.model_parallel_config"


@pytest.mark.parametrize("name", SHADOWED)
def test_shadowed_module_is_ours_and_runs_upstreams_file(name):
    module = __import__(name, fromlist=["x"])
    assert Path(module.__file__).is_relative_to(OURS)
    assert Path(module.__upstream_file__).is_relative_to(megatron.core.__path__[1])


def test_every_consumer_sees_the_same_class():
    from megatron.core import tensor_parallel
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_model
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    assert LocalSpecProvider().column_parallel_linear() is ColumnParallelLinear
    assert LocalSpecProvider().core_attention() is DotProductAttention
    assert tensor_parallel.ColumnParallelLinear is ColumnParallelLinear
    assert gpt_model.tensor_parallel.ColumnParallelLinear is ColumnParallelLinear


def test_classes_pickle_under_upstreams_name():
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    assert RowParallelLinear.__module__ == "megatron.core.tensor_parallel.layers"
    assert pickle.loads(pickle.dumps(RowParallelLinear)) is RowParallelLinear


def test_unprobed_classes_are_upstreams():
    """Off costs nothing: the only attribute that upstream's classes gain is the way to attach a probe."""
    upstream_only = (
        "import sys; sys.path[:] = [p for p in sys.path if p]\n"
        "from megatron.core.tensor_parallel.layers import ColumnParallelLinear as C\n"
        "from megatron.core.transformer.dot_product_attention import DotProductAttention as D\n"
        "print(sorted(vars(C)), '|', sorted(vars(D)))"
    )
    there = run_python(upstream_only, cwd=Path("/"), path=[])
    here = run_python(upstream_only, cwd=Path("/"), path=[ROOT])
    assert there.returncode == 0, there.stderr
    plain, overlaid = (set(result.stdout.split("|")[1].split("'")) for result in (there, here))
    assert overlaid - plain == {"attach_probe"}
    plain, overlaid = (set(result.stdout.split("|")[0].split("'")) for result in (there, here))
    assert overlaid - plain == {"attach_probe"}


def test_the_first_upstream_on_the_path_is_taken(tmp_path):
    """A checkout on PYTHONPATH goes under the overlay; the installed package then stays out entirely."""
    checkout = tmp_path / "megatron" / "core"
    checkout.mkdir(parents=True)
    (checkout / "__init__.py").write_text("marker = 'checkout'\n")
    (checkout / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 2\nPRE_RELEASE = ''\n")
    result = run_python(
        "import megatron.core as m; print(m.marker, len(m.__path__), m.__path__[1])",
        cwd=tmp_path / "megatron",
        path=[ROOT, tmp_path],
    )
    assert result.stdout.split() == ["checkout", "2", str(checkout)], result.stderr


def test_without_upstream_the_message_says_what_to_install(tmp_path):
    code = (
        f"import sys; sys.path[:] = [{str(ROOT)!r}] + [p for p in sys.path if 'site-packages' not in p]\n"
        "import megatron.core"
    )
    result = run_python(code, cwd=tmp_path, path=[])
    assert result.returncode == 1
    assert "no upstream megatron.core beside" in result.stderr
    assert "install megatron-core" in result.stderr


def test_spawned_processes_see_the_overlay():
    code = (
        "import multiprocessing as mp\n"
        "from megatron.core.tensor_parallel.layers import ColumnParallelLinear as C\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool: print(pool.apply(getattr, (C, '__module__')))\n"
        "    print(hasattr(C, 'attach_probe'))"
    )
    result = run_python(code, cwd=ROOT, path=[ROOT])
    assert result.stdout.split() == ["megatron.core.tensor_parallel.layers", "True"], result.stderr
