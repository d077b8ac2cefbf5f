"""The version and the folder of this package. The build reads the version here, so a wheel's is
a checkout's.
"""

import os

__version__ = "0.1.0"

FOLDER = os.path.dirname(os.path.abspath(__file__))
"""The folder of this package: code below it is no user's."""
