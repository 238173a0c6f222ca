"""The jar with our Java classes: compiled by Janino, which ships with Spark, so that no JDK is needed."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.runtime.presentation import install_hint

_SOURCES = Path(__file__).parent / "java"
# The package of all our classes: what else is compiled stands for classes of others, and stays out of the jar.
_PACKAGE = "parquet_keytools"
_COMPILER = "org.codehaus.commons.compiler.samples.CompilerDemo"
_COMPILER_JARS = ("janino-", "commons-compiler-")
# What the classes are compiled against: with other versions of these, they are compiled again.
_VERSIONS = (*_COMPILER_JARS, "parquet-hadoop-", "spark-core_", "hadoop-client-api-")
_TIMEOUT_SECONDS = 120


def build_jar(path: str | os.PathLike[str]) -> Path:
    """Compile our Java classes into a jar, for clusters whose administrator puts it in place.

    Args:
        path: Where; what is there is replaced.

    Raises:
        ConfigurationError: There is no Java or no Spark here, or the classes do not compile with this Spark.
    """
    target = Path(path)
    with tempfile.TemporaryDirectory(prefix="parquet-keytools-") as name:
        classes = Path(name)
        _compile(_spark_jars(), classes)
        # Made beside it and moved: two sessions that start together both find a whole jar.
        handle, pending = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as jar:
                for file in sorted((classes / _PACKAGE).rglob("*.class")):
                    # With fixed times, the same classes give the same jar.
                    entry = zipfile.ZipInfo(file.relative_to(classes).as_posix())
                    jar.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
            Path(pending).replace(target)
        except BaseException:
            Path(pending).unlink()
            raise
    return target


def cached_jar() -> Path:
    """Return the jar for this Spark, compiled once and kept in the user's cache; errors as `build_jar`."""
    folder = _cache_folder()
    jar = folder / f"parquet-keytools-spark-{_fingerprint(_spark_jars())}.jar"
    return jar if jar.is_file() else build_jar(jar)


def _fingerprint(jars: Path) -> str:
    digest = hashlib.sha256()
    for source in _source_files():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for jar in sorted(jars.glob("*.jar")):
        if jar.name.startswith(_VERSIONS):
            digest.update(jar.name.encode() + b"\0")
    return digest.hexdigest()[:20]


def _source_files() -> list[Path]:
    return sorted(_SOURCES.rglob("*.java"))


def _cache_folder() -> Path:
    """Return a folder that nobody else can write: what lies in it runs in every executor."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(OSError, RuntimeError):  # There may be no home.
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
        folder = root / "parquet-keytools"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours_alone(folder):
            return folder
    temporary = Path(tempfile.mkdtemp(prefix="parquet-keytools-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _is_ours_alone(folder: Path) -> bool:
    found = folder.lstat()
    if not hasattr(os, "getuid"):
        return os.access(folder, os.W_OK)
    others = stat.S_IWGRP | stat.S_IWOTH
    is_folder_of_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return is_folder_of_ours and not found.st_mode & others and os.access(folder, os.W_OK)


def _spark_jars() -> Path:
    """Return the folder of Spark's jars: those of SPARK_HOME, or of the package pyspark."""
    homes = [Path(os.environ["SPARK_HOME"])] if os.environ.get("SPARK_HOME") else []
    try:
        import pyspark
    except ImportError:
        pass
    else:
        homes.append(Path(pyspark.__file__).parent)
    for home in homes:
        if list((home / "jars").glob("janino-*.jar")):
            return home / "jars"
    raise ConfigurationError("there is no Spark here.", hint=f"{install_hint('spark')}, or set SPARK_HOME.")


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        place = "JAVA_HOME is set, and there is no java in its folder bin." if home else "there is no java here."
        raise ConfigurationError(place, hint="Spark needs a Java runtime, 17 or newer; a JDK is not needed.")
    return found


def _compile(jars: Path, target: Path) -> None:
    compiler = [str(jar) for jar in sorted(jars.glob("*.jar")) if jar.name.startswith(_COMPILER_JARS)]
    everything = [str(jar) for jar in sorted(jars.glob("*.jar"))]
    command = [
        _java(),
        "-XX:TieredStopAtLevel=1",  # It runs for a second.
        "-cp",
        os.pathsep.join(compiler),
        _COMPILER,
        "-d",
        str(target),
        "-encoding",
        "UTF-8",
        "-g:lines,source",
        "-classpath",
        os.pathsep.join(everything),
        *map(str, _source_files()),
    ]
    try:
        done = subprocess.run(  # noqa: S603 - Java and Spark of this user, and our own sources
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS, check=False
        )
        problem = (done.stdout + done.stderr).strip()
    except subprocess.TimeoutExpired:
        problem = f"it took more than {_TIMEOUT_SECONDS} seconds"
    # The compiler's exit status is 0 in any case.
    made = {path.stem for path in target.rglob("*.class")}
    if not made >= {path.stem for path in _source_files()}:
        raise ConfigurationError(
            f"our Java classes do not compile with the Spark in {jars.parent}: {problem[:2000]}.",
            hint="Spark 4 is supported.",
        )
