"""The driver of straw, for tests of a rank with a GPU."""

from gpu.straw.conftest import program as program
from gpu.straw.conftest import straw as straw
