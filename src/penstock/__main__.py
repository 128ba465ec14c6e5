"""`python -m penstock` is the command `penstock`."""

import sys

from penstock.commands.parser import main

sys.exit(main())
