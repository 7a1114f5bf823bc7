"""Draw the README's picture: `make pictures`."""

from pathlib import Path

from matplotlib import pyplot

import ppedu as pp

figure, panels = pyplot.subplots(2, 1, figsize=(11, 6.2), layout="constrained", sharex=True)
for name, ax in zip(("gpipe", "1f1b"), panels, strict=True):
    pp.simulate(pp.schedule(name, ranks=4, microbatches=8)).plot(ax, memory=8)
figure.savefig(Path(__file__).with_name("timelines.png"), dpi=140)
