"""Former name of `thunder_fn.parameters`, which transforms of users import."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("thunder_fn.parameters")
