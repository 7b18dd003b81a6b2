"""The version number of mucudnn."""

VERSION = "0.2.0.dev0"
