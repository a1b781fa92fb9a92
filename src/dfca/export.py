"""Write a model for other programs: safetensors by the names of its state dict, or ONNX; both with metadata."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from torch import Tensor, nn

from dfca.base.errors import ConfigError, RunError
from dfca.base.files import atomic_save, atomic_write
from dfca.core.learning.params import FlatModel


def write_safetensors(path: Path, flat: FlatModel, vector: Tensor, metadata: Mapping[str, str]) -> None:
    """Write one model (P,): its tensors by the names of the module's state dict, and the metadata."""
    _check_free(path)
    atomic_save(path, flat.named(vector), metadata)


def write_onnx(
    path: Path, module: nn.Module, shape: Sequence[int], outputs: Sequence[str], metadata: Mapping[str, str]
) -> None:
    """Write a module as ONNX: input `input` (n, *shape) float32 for any n, outputs by their names.

    Raises ConfigError where the library is missing or the module cannot be exported.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError:
        raise ConfigError("ONNX needs more libraries: pip install 'dfca[onnx]'") from None
    try:
        with _quiet():
            program = torch.onnx.export(
                module.eval(),
                (torch.zeros(2, *shape),),
                dynamo=True,
                input_names=["input"],
                output_names=list(outputs),
                dynamic_shapes=({0: torch.export.Dim("samples")},),
                verbose=False,
            )
    except Exception as error:  # torch's exporter raises what it likes on modules of the user's own
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"the model cannot be written as ONNX ({reason}); export it as safetensors") from error
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, dict(metadata))
    _check_free(path)
    atomic_write(path, proto.SerializeToString())


def _check_free(path: Path) -> None:
    """Refuse a folder or a link of that name."""
    if path.is_dir() or path.is_symlink():
        raise RunError(f"{path} is a {'link' if path.is_symlink() else 'folder'}; name a file to write")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress and its warnings about itself from the user's screen."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
