"""Recipes: experiments as TOML files. The recipes that come with mucudnn are in ``shipped``."""
