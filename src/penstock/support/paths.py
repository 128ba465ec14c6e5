"""Checks of paths: those that files are to be written to, before the work that fills them, and small files to be read.

In: paths. Out: words for users, empty where nothing is wrong; the bytes of a file.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile


def file_problem(path: str) -> str:
    """Return the reason why a file cannot be written at a path; empty when it can. An existing file stays as it is."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "is a directory, not a file"
        if stat.S_ISREG(mode):
            with open(path, "ab"):
                return ""
        # Opening a pipe would wait for its reader.
        return "" if os.access(path, os.W_OK) else "cannot be written to"
    except FileNotFoundError:
        return directory_problem(os.path.dirname(path) or os.curdir)
    except OSError as error:
        return error.strerror or str(error)


def replacing_problem(path: str) -> str:
    """Return the reason why a file cannot be written beside a path and then take its name; empty when it can."""
    problem = file_problem(path)
    if problem or (os.path.exists(path) and not os.path.isfile(path)):
        return problem
    return directory_problem(os.path.dirname(os.path.realpath(path)))


def directory_problem(path: str) -> str:
    """Return the reason why files cannot be written into a directory, which need not exist yet; empty when they can."""
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return f"{path} is not a directory"
        # Permissions are not enough: a file system may be read-only or take no files. The temporary file leaves no name
        # behind.
        with tempfile.TemporaryFile(dir=path):
            return ""
    except FileNotFoundError as error:
        parent = os.path.dirname(path) or os.curdir
        if parent == path or os.path.lexists(path):
            return f"cannot write into {path}: {error.strerror}"
        return directory_problem(parent)
    except OSError as error:
        return f"cannot write into {path}: {error.strerror or error}"


def name_problem(path: str | os.PathLike[str]) -> str:
    """Return the reason why a path cannot be named in messages and files, which hold UTF-8; empty when it can."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return "its name is no UTF-8"
    return ""


def read_plain(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a plain file; OSError for anything else, and for a longer file. A pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", os.fspath(path))
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"is longer than {most} bytes", os.fspath(path))
    return data


def is_inside(path: str, directory: str) -> bool:
    """Return whether a path is a directory or lies in it; both are absolute."""
    return os.path.commonpath([path, directory]) == directory
