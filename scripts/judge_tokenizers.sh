#!/usr/bin/env bash
# Judge the tokenizers rebuilt from GGUF metadata by llama.cpp's own vectors: ids must be equal, text by text.
# The vectors travel in the source distribution of llama-cpp-python; it is fetched into a temporary folder and removed.
# Usage: scripts/judge_tokenizers.sh [SDIST.tar.gz]     PYTHON names the interpreter (default: python3)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
[[ -z "${PYTHON:-}" && -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

sdist="${1:-}"
if [[ -z "$sdist" ]]; then
  echo "fetching the source distribution of llama-cpp-python ..." >&2
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --dest "$scratch" llama-cpp-python >&2
  sdist="$(ls "$scratch"/llama_cpp_python-*.tar.gz)"
fi

PYTHONPATH="$root" "$python" - "$sdist" "$scratch/vocabularies" <<'PYTHON'
import sys
import tarfile
from pathlib import Path

from mlxpaged.errors import MlxpagedError
from mlxpaged.model.gguf_file import GgufFile
from mlxpaged.model.gguf_tokenizer import gguf_tokenizer

REQUIRED = {"gpt-2", "qwen2", "llama-bpe", "llama-spm", "phi-3"}
sdist, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir()
with tarfile.open(sdist) as archive:
    for member in archive:
        if member.isfile() and "/models/ggml-vocab-" in member.name:
            (folder / Path(member.name).name).write_bytes(archive.extractfile(member).read())

failed, seen = [], set()
for vocabulary in sorted(folder.glob("ggml-vocab-*.gguf")):
    texts, ids = Path(f"{vocabulary}.inp"), Path(f"{vocabulary}.out")
    if not texts.exists():
        continue
    name = vocabulary.stem.removeprefix("ggml-vocab-")
    try:
        tokenizer = gguf_tokenizer(GgufFile(vocabulary))
    except MlxpagedError as error:
        print(f"{'FAIL' if name in REQUIRED else 'refused':8}{name:16}{error}")
        failed += [name] * (name in REQUIRED)
        continue
    cases = texts.read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    wanted = [[int(id_) for id_ in line.split()] for line in ids.read_text().split("\n")]
    wrong = [(text, want, got) for text, want in zip(cases, wanted) if (got := tokenizer.encode(text)) != want]
    seen.add(name)
    print(f"{'FAIL' if wrong else 'pass':8}{name:16}{len(cases) - len(wrong)}/{len(cases)} texts")
    for text, want, got in wrong[:3]:
        print(f"        {text!r}\n          want {want}\n          got  {got}")
    failed += [name] * bool(wrong)
if missing := REQUIRED - seen - set(failed):
    failed += sorted(missing)
    print("FAIL    no vectors for", ", ".join(sorted(missing)))
sys.exit(f"{len(failed)} of the vocabularies fail: {', '.join(failed)}" if failed else 0)
PYTHON
