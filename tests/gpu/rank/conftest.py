"""The driver of straw, for tests of a rank with a GPU."""

from ..straw.conftest import program as program
from ..straw.conftest import straw as straw
