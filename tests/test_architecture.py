"""The house rules that a program can see: imports run one way, files and functions stay small (DESIGN 1)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUANTSCOPE = "megatron.quantscope"
LARGEST_FILE = 400
LONGEST_FUNCTION = 60

# Package -> the packages of ours it may import, itself aside.
ALLOWED = {
    "megatron.quantscope.flags": set(),
    "megatron.quantscope.formats": {"megatron.quantscope.flags", "megatron.quantscope.cache"},
    "megatron.quantscope.gemm": {"megatron.quantscope.flags", "megatron.quantscope.formats"},
    "megatron.quantscope.capture": {
        "megatron.quantscope.flags",
        "megatron.quantscope.formats",
        "megatron.quantscope.columns",
    },
    "megatron.quantscope.analysis": {
        "megatron.quantscope.flags",
        "megatron.quantscope.formats",
        "megatron.quantscope.capture",
    },
    "megatron.quantscope.report": {
        "megatron.quantscope.columns",
        "megatron.quantscope.flags",
        "megatron.quantscope.formats",
        "megatron.quantscope.capture",
        "megatron.quantscope.analysis",
    },
}
FLAGS_MAY_IMPORT = {"__future__", "argparse", "collections", "dataclasses", "math", "typing", "megatron"}

sources = sorted(path for folder in ("megatron", "script", "tests") for path in (ROOT / folder).rglob("*.py"))
library = [path for path in sources if path.is_relative_to(ROOT / "megatron" / "quantscope")]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Every module imported anywhere in the file, inside functions and TYPE_CHECKING blocks too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_every_package_of_the_library_has_its_rule():
    packages = {name_of(path.parent / "__init__.py") for path in library} - {QUANTSCOPE}
    assert all(any(inside(package, ruled) for ruled in ALLOWED) for package in packages)


@pytest.mark.parametrize("path", library, ids=name_of)
def test_imports_run_one_way(path):
    package = next((package for package in ALLOWED if inside(name_of(path), package)), None)
    allowed = ALLOWED.get(package, set()) | {package}
    for module in imports_of(path):
        if inside(module, QUANTSCOPE) and module != QUANTSCOPE:
            assert any(inside(module, other) for other in allowed), f"{path} imports {module}"


@pytest.mark.parametrize("path", library, ids=name_of)
def test_the_library_knows_nothing_of_megatron(path):
    for module in imports_of(path):
        assert not inside(module, "megatron.core"), f"{path} imports {module}"
        assert not inside(module, "megatron.training"), f"{path} imports {module}"


@pytest.mark.parametrize("path", [path for path in library if path.parent.name == "flags"], ids=name_of)
def test_flags_import_the_standard_library_only(path):
    assert {module.partition(".")[0] for module in imports_of(path)} <= FLAGS_MAY_IMPORT


def test_megatron_is_a_namespace():
    assert not (ROOT / "megatron" / "__init__.py").exists()


@pytest.mark.parametrize("path", sources, ids=name_of)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= LARGEST_FILE, path
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno <= LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", sources, ids=name_of)
def test_torch_load_reads_weights_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"
