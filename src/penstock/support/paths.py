"""Checks of paths that files are to be written to, before the work that fills them.

In: paths. Out: words for users, empty where nothing is wrong.
"""

from __future__ import annotations

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


def is_inside(path: str, directory: str) -> bool:
    """Say whether a path is a directory or lies in it; both are absolute."""
    return os.path.commonpath([path, directory]) == directory
