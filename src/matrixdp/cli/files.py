"""Writes a released matrix together with its certificate, or neither; reserves names and space before the release."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from matrixdp._check import Array
from matrixdp.accounting.composition import Composition, saved
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy.certificate import Certificate
from matrixdp.privacy.records import digest
from matrixdp.privacy.verification import beside as arrays_path

# The most bytes of an entry in each format: CSV has up to 24 characters and a separator; Parquet may write an entry
# into a dictionary, with an index to it, and 4096 bytes more for each column and for the file.
FORMATS = {".csv": 25, ".npy": 8, ".parquet": 16}
_MORE = 4096


def certificate_path(output: Path) -> Path:
    """The path of a matrix's certificate, next to the matrix."""
    return output.with_suffix(".certificate.json")


def check_free(output: Path) -> None:
    """Raises InvalidInput unless the matrix and its certificate can be written without replacing a file."""
    if output.suffix not in FORMATS:
        raise InvalidInput(f"output must end in {', '.join(FORMATS)}, got {str(output)!r}")
    if not output.parent.is_dir():
        raise InvalidInput(f"output must lie in a folder that exists, got {str(output)!r}; create the folder first")
    for path in _names(output):
        if path.exists() or path.is_symlink():
            raise _taken(path)
    if output.suffix == ".parquet":
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError as reason:
            raise InvalidInput(
                f"output must not end in .parquet here: pyarrow cannot be imported ({reason}); use .csv or .npy"
            ) from None


def write_new(output: Path, text: str) -> None:
    """Writes text to a file that does not exist yet."""
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _taken(output) from None
    except OSError as reason:
        raise InvalidInput(f"output {str(output)!r} cannot be written ({reason.strerror})") from None


def _names(output: Path) -> tuple[Path, Path, Path]:
    """The released matrix, its certificate, and the arrays of a certificate that has large ones."""
    beside = certificate_path(output)
    return output, beside, arrays_path(beside)


@dataclass(frozen=True)
class Content:
    """How a released value is written: the most bytes that it takes, and the function that writes it."""

    size: int
    write: Callable[[BinaryIO, Any], None]


@contextmanager
def reserved(output: Path, certificate: Certificate | Composition, content: Content | None = None) -> Iterator[Place]:
    """Reserves the names and the space of a matrix and its certificate, until they are published or the release fails.

    The names are reserved by empty files, which only one of several writers can create; the space by drafts of full
    size in a folder next to them. So a lost race, a folder that cannot be written to and a full disk are found here,
    before a release is charged. Hard links are not needed.

    Args:
        output: the file of the matrix.
        certificate: the certificate of the release.
        content: how the value is written; as a matrix by default.

    Raises:
        InvalidInput: if a name is taken, or the file cannot be written.
    """
    check_free(output)
    if content is None:
        assert isinstance(certificate, Certificate)
        content = _matrix(output, certificate.shape)
    text, arrays = saved(replace(certificate, released=_released(output, b"")))
    sizes = {output: content.size}
    sizes |= {
        path: len(content) for path, content in zip(_names(output)[1:], (text.encode(), arrays), strict=True) if content
    }
    names: list[Path] = []
    try:
        try:
            drafts = TemporaryDirectory(dir=output.parent, prefix=".matrixdp-", ignore_cleanup_errors=True)
        except OSError as reason:
            raise _not_writable(output, reason) from None
        with drafts as folder:
            place = Place(output, certificate, {path: Path(folder, path.name) for path in sizes}, content.write)
            try:
                for path, size in sizes.items():
                    _fill(place.drafts[path], size)
                for path in reversed(sizes):  # the certificate's name decides between two writers
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                    names.append(path)
            except FileExistsError:
                raise _taken(path) from None
            except OSError as reason:
                raise _not_writable(output, reason) from None
            yield place
    finally:
        for path in names:
            _free(path)


@dataclass(frozen=True)
class Place:
    """A reserved place for one matrix and its certificate, and a draft for each of their files."""

    output: Path
    certificate: Certificate | Composition
    drafts: dict[Path, Path]
    write: Callable[[BinaryIO, Any], None]

    def publish(self, value: Any) -> Any:
        """Writes the matrix and its certificate, to which it adds the matrix's file name and SHA-256.

        All files are drafted and then renamed, the matrix last: a matrix never exists without its certificate.

        Returns:
            The certificate as written.
        """
        try:
            with _rewritten(self.drafts[self.output]) as file:
                self.write(file, value)
            content = self.drafts[self.output].read_bytes()
            complete = replace(self.certificate, released=_released(self.output, content))
            text, arrays = saved(complete)
            for path, part in zip(_names(self.output)[1:], (text.encode(), arrays), strict=True):
                if path in self.drafts:
                    with _rewritten(self.drafts[path]) as file:
                        _write_certificate(file, part)
            for path in self.drafts:
                if not _is_reserved(path):
                    raise FileExistsError(f"{str(path)!r} was written by someone else meanwhile")
            moved: list[Path] = []
            try:
                for path in reversed(self.drafts):
                    os.replace(self.drafts[path], path)
                    moved.append(path)
            except BaseException:
                for path in moved:
                    path.unlink()
                raise
        except OSError as reason:
            raise MatrixDPError(
                f"output {str(self.output)!r} could not be written ({reason}); nothing was left behind, but a ledger "
                "that was given has been charged"
            ) from None
        return complete


def _released(output: Path, content: bytes) -> dict[str, str]:
    return {"file": output.name, "sha256": digest(content)}


def _taken(path: Path) -> InvalidInput:
    reserved = path.is_file() and not path.stat().st_size > 0
    why = ". It is empty: a release reserves it now, or was killed; remove it if none is running" if reserved else ""
    return InvalidInput(f"output {str(path)!r} exists already and is not replaced; choose another name{why}")


def _not_writable(output: Path, reason: OSError) -> InvalidInput:
    return InvalidInput(
        f"output {str(output)!r} cannot be written ({reason.strerror or reason}); nothing was released or charged. "
        "Choose a folder that can be written to and has room"
    )


def _matrix(output: Path, shape: Sequence[int]) -> Content:
    """How a matrix is written."""
    suffix = output.suffix
    if len(shape) not in (1, 2) and suffix != ".npy":
        raise InvalidInput(f"output must end in .npy for a value of {len(shape)} dimensions, got {str(output)!r}")
    columns = shape[1] if suffix == ".parquet" and len(shape) == 2 else 1
    size = math.prod(shape) * FORMATS[suffix] + _MORE * (1 + columns)
    return Content(size, lambda file, value: _write_matrix(file, suffix, value))


def _is_reserved(path: Path) -> bool:
    """Whether a name is still ours: an empty file, or nothing."""
    return not path.is_symlink() and (not path.exists() or path.stat().st_size == 0)


def _free(path: Path) -> None:
    """Removes a reservation that was not used."""
    with suppress(OSError):
        if _is_reserved(path):
            path.unlink()


def _fill(draft: Path, size: int) -> None:
    """Writes zeros, so that the disk has room for the content."""
    with draft.open("wb") as file:
        for first in range(0, size, 1 << 20):
            file.write(bytes(min(1 << 20, size - first)))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _rewritten(draft: Path) -> Iterator[BinaryIO]:
    """The draft, to be written from its start; the remaining zeros are cut off."""
    with draft.open("r+b") as file:
        yield file
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _write_matrix(file: BinaryIO, suffix: str, value: Array) -> None:
    """Writes a matrix with all digits; a vector becomes one column."""
    if suffix == ".npy":
        np.save(file, value)
    elif suffix == ".csv":
        np.savetxt(file, value, delimiter=",", fmt="%.17g")
    else:
        import pyarrow
        import pyarrow.parquet

        columns = value.reshape(len(value), -1).T
        table = pyarrow.table({str(index): column for index, column in enumerate(columns)})
        pyarrow.parquet.write_table(table, file)


def _write_certificate(file: BinaryIO, content: bytes) -> None:
    file.write(content)
