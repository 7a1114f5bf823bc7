import matplotlib
import pytest

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    from matplotlib import pyplot

    yield
    pyplot.close("all")
