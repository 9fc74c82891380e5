"""Tiny wheels made on the spot, and a lock of them: what the set-up tests install instead of torch."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import sys
import zipfile
from pathlib import Path

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
DIGEST = "0" * 64


def make_wheel(folder, name, version="1.0", files=None):
    """Write a pure wheel of `files` (path -> text; by default one module) and return its lock line."""
    info = f"{name}-{version}.dist-info"
    content = {path: text.encode() for path, text in (files or {f"{name}.py": f"version = '{version}'\n"}).items()}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return _pack(folder, name, version, content, info)


def repack(folder, name):
    """Make a wheel of a pure package that is installed here, and return its lock line."""
    distribution = importlib.metadata.distribution(name)
    files = distribution.files or []
    keep = [file for file in files if file.suffix != ".pyc" and file.name not in ("RECORD", "REQUESTED", "INSTALLER")]
    content = {str(file): Path(str(file.locate())).read_bytes() for file in keep}
    info = next(file.parts[0] for file in keep if file.parts[0].endswith(".dist-info"))
    return _pack(folder, name, distribution.version, content, info)


def _pack(folder, name, version, content, info):
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((path, f"sha256={digest}", len(data)))
    rows.writerow((f"{info}/RECORD", "", ""))
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in {**content, f"{info}/RECORD": record.getvalue().encode()}.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if ".data/scripts/" in path else 0o100644) << 16
            archive.writestr(entry, data)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{name.replace('_', '-')}=={version} --hash=sha256:{digest}"


def lock_text(*sections):
    """The text of a lock; each section is (environment, accelerator, lines)."""
    tables = []
    for environment, accelerator, lines in sections:
        packages = "".join(f'    "{line}",\n' for line in lines)
        tables.append(
            f"[{environment}.{accelerator}.py{PYTHON.replace('.', '')}]\n"
            f'source = "none"\nsource_digest = "{DIGEST}"\nplatform = "x86_64-manylinux_2_17"\n'
            f"download_bytes = 1000\npackages = [\n{packages}]\n"
        )
    return "\n".join(["version = 1\n", *tables])
