"""`pdserve inspect`: what there is, whether it is served, and why not in the words of `up`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pdserve.commands.bench.checkpoints.gguf_checkpoint import write_gguf
from pdserve.commands.cli.main import main
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.shared.errors import PdserveError
from pdserve.shared.process.exit_codes import FAILED, OK
from tests.checkpoints import edit_config, make_checkpoint
from tests.quantised_files import FORMATS, quantised


def told(capsys: pytest.CaptureFixture[str], path: Path, code: int) -> dict[str, str]:
    assert main(["inspect", str(path)]) == code
    lines = capsys.readouterr().out.splitlines()
    return {line[:10].strip(): line[11:] for line in lines}


def test_a_gguf_file_is_told_like_the_folder_it_was_made_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "demo.gguf"
    write_gguf(CHECKPOINT_PATH, file)
    of_folder, of_file = (told(capsys, path, OK) for path in (CHECKPOINT_PATH, file))
    for same in ("model", "templates", "sampling", "served"):
        assert of_file[same] == of_folder[same]
    assert of_file["what"].endswith("is a model for llama.cpp (GGUF)")
    assert "LlamaForCausalLM, 4 layers of 192" in of_file["model"]
    assert "29 BF16 (3.8 MiB), 9 F32" in of_file["weights"]
    assert of_file["packed"] == "on CPUs, BF16 as bfloat16 (17, 3.8 MiB, exact)"
    assert "BPE of 2048 tokens; texts begin with <|bos|>" in of_file["tokenizer"]
    assert of_file["sampling"].startswith("temperature 1, all tokens")
    assert of_file["served"] == "yes"


def test_a_quantised_checkpoint_is_told_with_its_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "made", "llama")
    quantised(made, tmp_path / "q", FORMATS["awq"])
    found = told(capsys, tmp_path / "q", OK)
    assert found["what"].endswith("is a quantised checkpoint")
    assert "awq: 4 bits by 16 in " in found["weights"]
    assert "28 I32" in found["weights"]
    assert found["served"] == "yes"
    edit_config(tmp_path / "q", quantization_config={"quant_method": "quanto"})
    assert "(quanto): take a GGUF" in told(capsys, tmp_path / "q", FAILED)["served"]


def test_a_vocabulary_beyond_the_models_is_told_as_a_coordinator_would(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(CHECKPOINT_PATH, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["beyond"] = 5000
    file.write_text(json.dumps(tokenizer))
    assert "such as beyond (5000), that the model" in told(capsys, file.parent, FAILED)["served"]


def test_what_is_not_served_is_told_as_far_as_it_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "demo.gguf"
    write_gguf(CHECKPOINT_PATH, file)
    file.write_bytes(
        file.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gemma", 1)
    )
    found = told(capsys, file, FAILED)
    assert found["served"].startswith(f"no: {file} is of the architecture gemma; supported are")
    assert "29 BF16" in found["weights"]
    assert "model" not in found
    (tmp_path / "notes").mkdir()
    with pytest.raises(PdserveError) as info:
        resolve_checkpoint(str(tmp_path / "notes"))
    assert told(capsys, tmp_path / "notes", FAILED)["served"] == f"no: {info.value}"
