"""What drawing leaves alone."""

import subprocess
import sys


def test_drawing_leaves_the_global_state_of_matplotlib_alone() -> None:
    draw = "import sys; from mucudnn.bench.report.plots import new_figure; new_figure(2, 2, 'a').add_subplot()"
    code = f"{draw}; print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
