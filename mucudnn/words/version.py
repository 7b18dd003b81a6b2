"""The version of mucudnn."""

VERSION = "0.1.0"
