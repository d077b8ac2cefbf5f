"""The version of this package. The build reads it here, so it is the same from a wheel and from a checkout."""

__version__ = "0.1.0"
