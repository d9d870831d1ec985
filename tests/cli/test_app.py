"""Exit codes, messages and the speed of `headrace --help`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import app as cli
from headrace.cli import doctor
from headrace.errors import TrainingError


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "eval", "merge", "doctor"))


def test_help_imports_no_heavy_library() -> None:
    heavy = "{'torch', 'jax', 'transformers', 'peft', 'sklearn', 'numpy'}"
    code = (
        "import sys; from headrace.cli.app import run; run(['--help']); "
        f"sys.exit(bool({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace 0.")


def test_unknown_setting_offers_the_nearest_and_exits_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["train", "--lerning_rate", "1e-4", "--packing", "maybe"]) == cli.EXIT_USER
    shown = capsys.readouterr().err
    assert "did you mean learning_rate?" in shown
    assert "packing" in shown
    assert "Traceback" not in shown


def test_settings_of_a_file_and_flags_are_shown_with_their_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: some/model\nmax_seq_length: 64\n")
    assert cli.run(["train", str(recipe), "--seed", "5", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "recipe.yaml:1" in shown
    assert "max_seq_length is called max_length here" in shown
    assert "seed" in shown


def test_every_setting_is_listed_with_its_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.config import TrainConfig

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["train", "--settings"]) == 0
    shown = capsys.readouterr().out
    assert [n for n in TrainConfig.model_fields if f"--{n} " not in shown] == []
    assert "2e-4 with LoRA" in shown


def test_a_missing_recipe_is_an_error_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "no-such.yaml"]) == cli.EXIT_USER
    assert "no-such.yaml cannot be read" in capsys.readouterr().err


def test_eval_before_training_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--output_dir", str(tmp_path), "--model_name_or_path", "x"]
    assert cli.run(words) == cli.EXIT_USER
    assert "holds no model or adapter yet" in " ".join(capsys.readouterr().err.split())


def test_merge_of_a_folder_that_is_no_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["merge", str(tmp_path), str(tmp_path / "out")]) == cli.EXIT_USER
    assert "adapter_config.json" in capsys.readouterr().err


def test_a_failed_run_exits_1_and_ctrl_c_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> int:
        def raise_it(words: list[str]) -> None:
            raise error

        monkeypatch.setattr("headrace.cli.train.read_settings", raise_it)
        return cli.run(["train"])

    assert fail(TrainingError("the loss is not finite")) == cli.EXIT_FAILED
    assert fail(KeyboardInterrupt()) == cli.EXIT_INTERRUPTED


def test_debug_shows_where_an_error_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    with pytest.raises(ValueError, match="cannot be read"):
        cli.run(["train", "no-such.yaml"])


def test_an_unknown_command_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tarin"]) == cli.EXIT_USER
    assert "tarin" in capsys.readouterr().err


def test_doctor_here_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "jaxlib" in shown
    assert "devices" in shown


def test_doctor_names_a_version_that_is_out_of_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.4.1" if name == "jax" else real(name))
    assert cli.run(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "x jax " in shown
    assert "released together" in shown
