"""Types that all folders of mucudnn share: problems, configs, results, units, errors.

This folder imports no other folder of mucudnn, and torch only inside functions.
"""

VERSION = "0.2.0.dev0"
