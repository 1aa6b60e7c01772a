"""Where rows come from: files, folders and hub data sets, read as a stream of chunks."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from surogate.data.chunks import CHUNK_ROWS, Chunk, Segment
from surogate.data.options import DatasetSpec
from surogate.data.readers import KINDS, PACKED, batches_to_chunks, kind_of, read_file
from surogate.errors import UserError

_SPLIT_WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "validation",
}  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Source:
    """One data set of the configuration.

    Args:
        spec: what the user wrote.
        where: its key, for messages (``datasets.0``).

    Raises:
        UserError: nothing there, or no file that can be read.
    """

    def __init__(self, spec: DatasetSpec, where: str) -> None:
        self.spec, self.where = spec, where
        self.notes: list[str] = []
        self.files: list[Path] = []
        self._hub: Any = None
        path = Path(spec.path).expanduser()
        if path.is_dir():
            self.files = self._folder(path)
        elif path.is_file():
            self.files = [path]
        elif any(char in spec.path for char in "*?["):
            self.files = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
            if not self.files:
                raise UserError(f"no file matches {spec.path!r}", where=where)
        elif not self._may_be_on_hub(path):
            raise UserError(f"there is no file {spec.path!r}", where=f"{where}.path", fix="check the path")
        if self.files and spec.split and "[" in spec.split:
            raise UserError(
                f"split {spec.split!r} asks for a part of a local file",
                where=f"{where}.split",
                fix="write samples: N to take the first N rows",
            )

    def _may_be_on_hub(self, path: Path) -> bool:
        known = {*KINDS, *PACKED} & set(path.suffixes)
        return _HUB_ID.fullmatch(self.spec.path) is not None and not known

    def _folder(self, folder: Path) -> list[Path]:
        found = sorted(p for p in folder.rglob("*") if p.is_file() and not any(x.startswith(".") for x in p.parts[1:]))
        data = [p for p in found if kind_of(p) is not None]
        if (folder / "dataset_info.json").is_file() or (folder / "state.json").is_file():
            data = [p for p in data if kind_of(p) != "json"]  # a data set saved by the datasets library
        kinds = sorted({str(kind_of(p)) for p in data})
        if len(kinds) > 1:
            raise UserError(
                f"the folder holds several kinds of data files: {', '.join(kinds)}",
                where=str(folder),
                fix=f"name one kind: path: {folder}/*{data[0].suffix}",
            )
        if not data:
            others = ", ".join(p.name for p in found[:5]) or "nothing"
            raise UserError(
                "the folder holds no data file", where=str(folder), expected=f"{', '.join(KINDS)} (found: {others})"
            )
        other = [p.name for p in found if p not in data]
        if other:
            more = ", …" if len(other) > 5 else ""
            self.notes.append(f"{folder}: {len(other)} other files are not read ({', '.join(other[:5])}{more})")
        return self._of_split(folder, data)

    def _of_split(self, folder: Path, data: list[Path]) -> list[Path]:
        """Where files are named after splits, as on the hub, take those of the split that is asked for."""

        def split_of(path: Path) -> str | None:
            words = re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())
            return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)

        splits = {path: split_of(path) for path in data}
        names = sorted({name for name in splits.values() if name})
        if not names:
            return data
        wanted = _SPLIT_WORDS.get(self.spec.split or "train", self.spec.split)
        chosen = [path for path, name in splits.items() if name == wanted]
        if not chosen:
            raise UserError(
                f"the folder has no files of the split {self.spec.split or 'train'!r}",
                where=str(folder),
                expected=f"one of the splits that its files are named after: {', '.join(names)}",
            )
        if len(chosen) < len(data):
            self.notes.append(f"{folder}: {len(chosen)} of {len(data)} files are of the split {wanted}")
        return chosen

    # Identity

    def names(self) -> list[str]:
        """Return the names of the files, as messages show them."""
        return [str(path) for path in self.files] or [self.spec.path]

    def key(self, hash_file: Callable[[Path], str]) -> dict[str, Any]:
        """Return what the rows depend on, as plain data. Opens the data set if it is on the hub."""
        spec = self.spec
        return {
            "contents": [hash_file(path) for path in self.files] or [self._hub_data()._fingerprint],
            "kinds": [path.suffixes for path in self.files],
            "type": spec.type,
            "samples": spec.samples,
            "fields": dict(spec.fields),
        }

    def size(self) -> int:
        """Return the bytes of all rows, about; 0 if unknown."""
        if self._hub is not None:
            return int(getattr(self._hub.data, "nbytes", 0))
        return sum(path.stat().st_size for path in self.files)

    # Reading

    def chunks(self, segments: bool) -> Iterator[Chunk]:
        """Yield the data set chunk by chunk.

        Args:
            segments: hand long text files over in stretches; else a text file is one row.

        Raises:
            UserError: a file is damaged, or the hub cannot be reached.
        """
        left = self.spec.samples
        for chunk in self._all(segments):
            if left is None:
                yield chunk
            elif isinstance(chunk, Segment):
                yield chunk
                left -= chunk.last
                if left == 0:
                    return
            else:
                count = chunk.count()
                yield chunk if count <= left else chunk.head(left)
                left -= min(left, count)
                if left == 0:
                    return

    def _all(self, segments: bool) -> Iterator[Chunk]:
        if not self.files:
            yield from _hub_chunks(self._hub_data(), self.spec.path)
        for index, path in enumerate(self.files):
            name = str(path)
            kind = kind_of(path) or {"json": "json", "text": "text"}.get(self.spec.type)
            if kind is None:
                raise UserError(
                    f"files that end in {path.suffix or 'nothing'!r} are not known",
                    where=name,
                    expected=f"{', '.join(KINDS)}; also with .gz or .zst",
                    fix="type: json or type: text says what the file is",
                )
            if path.stat().st_size == 0:
                raise UserError("the file is empty", where=name)
            yield from read_file(index, path, kind, segments)

    def _hub_data(self) -> Any:
        if self._hub is None:
            self._hub = _load_from_hub(self.spec, self.where)
        return self._hub


def _hub_chunks(data: Any, name: str) -> Iterator[Chunk]:
    tables = data.with_format("arrow").iter(CHUNK_ROWS)
    yield from batches_to_chunks(0, name, (batch for table in tables for batch in table.to_batches()))


def _load_from_hub(spec: DatasetSpec, where: str) -> Any:
    """Open a data set of the hub, from the cache of the ``datasets`` library where it is complete.

    Raises:
        UserError: the library is not installed, or there is no such data set, or it cannot be fetched.
    """
    offline = (
        f"check the name and the network. Without network: download it elsewhere (hf download --repo-type dataset "
        f"{spec.path} --local-dir DIR), copy DIR here and write path: DIR"
    )
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{spec.path!r} is no local file, and data sets of the hub need the datasets library",
            where=f"{where}.path",
            fix="pip install datasets, or give the path of a local file",
        ) from None
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(spec.path, spec.subset, split=spec.split or "train")
    except Exception as error:  # network, cache, hub and parsing errors have no common class
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{spec.path!r} is no local file, and the hub does not give such a data set: {text}",
            where=f"{where}.path",
            fix=offline,
        ) from None
