# SPDX-License-Identifier: Apache-2.0
"""Wheel files, byte for byte the same on every build: sorted entries, one fixed time, fixed modes, RECORD last.

Entries of another wheel are taken over in their compressed form, so that hundreds of megabytes of compiled code are
neither unpacked nor compressed again.
"""

import base64
import csv
import hashlib
import io
import shutil
import struct
import zipfile
from pathlib import Path

TIME = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can say
LOCAL_HEADER = struct.Struct("<4s5H3L2H")


def record_hash(data: bytes) -> str:
    """``sha256=...`` as the wheel format's RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def read_record(text: str) -> dict[str, tuple[str, int]]:
    """Path -> (hash, size in bytes) of a RECORD; entries without a hash (RECORD itself) are left out."""
    return {path: (digest, int(size)) for path, digest, size in csv.reader(io.StringIO(text)) if digest}


class WheelWriter:
    """Collects entries in any order with ``add`` and ``take``; ``close`` writes them sorted, then RECORD."""

    def __init__(self, path: Path, dist_info: str):
        self.path = path
        self.record_name = f"{dist_info}/RECORD"
        self._data: dict[str, bytes | Path] = {}
        self._taken: dict[str, tuple[zipfile.ZipFile, zipfile.ZipInfo, tuple[str, int]]] = {}

    def add(self, name: str, data: bytes | Path) -> None:
        """Entry with the given content; a Path is read when the wheel is written. Replaces a taken entry of that
        name."""
        self._taken.pop(name, None)
        self._data[name] = data

    def take(self, source: zipfile.ZipFile, info: zipfile.ZipInfo, record: tuple[str, int]) -> None:
        """Entry of another wheel as it is, compressed bytes included; record is its (hash, size) there. Source stays
        open until ``close``; its hashes must have been verified by the caller."""
        self._taken[info.filename] = (source, info, record)

    def close(self) -> Path:
        """Write the file under a temporary name, rename it; returns its path."""
        partial = self.path.with_name(self.path.name + ".partial")
        rows = []
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
            for name in sorted(self._data.keys() | self._taken.keys()):
                rows.append((name, *self._write(wheel, name)))
            rows.append((self.record_name, "", ""))
            record = io.StringIO()
            csv.writer(record, lineterminator="\n").writerows(rows)
            wheel.writestr(_entry(self.record_name), record.getvalue())
        partial.rename(self.path)
        return self.path

    def _write(self, wheel: zipfile.ZipFile, name: str) -> tuple[str, int]:
        if name in self._taken:
            source, info, record = self._taken[name]
            _copy_compressed(source, info, wheel)
            return record
        data = self._data[name]
        content = data.read_bytes() if isinstance(data, Path) else data
        wheel.writestr(_entry(name), content)
        return record_hash(content), len(content)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3  # Unix, so that the mode below is honoured
    entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
    return entry


def _copy_compressed(source: zipfile.ZipFile, info: zipfile.ZipInfo, target: zipfile.ZipFile) -> None:
    """Append info's entry of source to target without inflating it."""
    entry = _entry(info.filename)
    entry.compress_type, entry.CRC = info.compress_type, info.CRC
    entry.compress_size, entry.file_size = info.compress_size, info.file_size
    raw = source.fp
    raw.seek(info.header_offset)
    header = LOCAL_HEADER.unpack(raw.read(LOCAL_HEADER.size))
    raw.seek(header[-2] + header[-1], 1)  # over the name and the extra field
    target.fp.seek(target.start_dir)
    entry.header_offset = target.fp.tell()
    target.fp.write(entry.FileHeader())
    left = info.compress_size
    while left:
        chunk = raw.read(min(left, shutil.COPY_BUFSIZE))
        if not chunk:
            raise zipfile.BadZipFile(f"{source.filename}: {info.filename} is cut short")
        target.fp.write(chunk)
        left -= len(chunk)
    target.filelist.append(entry)
    target.NameToInfo[entry.filename] = entry
    target.start_dir = target.fp.tell()
