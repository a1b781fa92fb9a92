"""The known data sets: what they are, where their official files are, and the checksums of those files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dfca.base.errors import unknown

SampleKind = Literal["image", "window", "series"]


@dataclass(frozen=True)
class RemoteFile:
    """One official file. `urls` are mirrors of the same bytes; `sha256` is None where none is published."""

    name: str
    urls: tuple[str, ...]
    sha256: str | None
    size_bytes: int | None


@dataclass(frozen=True)
class Source:
    """A data set: its shape (channels first), its official files, and how to get it where there are none.

    on_white: its images are dark on white. They are inverted for models, so that the background is 0 as in the others:
    where nearly every input is 1, a few steps at the paper's learning rates leave all units of an MLP dead.
    """

    name: str
    description: str
    kind: SampleKind
    classes: int
    shape: tuple[int, ...]
    samples: str
    homepage: str
    licence: str
    citation: str
    files: tuple[RemoteFile, ...] = ()
    by_hand: str = ""
    on_white: bool = False
    task: str = "classification"


_MNIST_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
)
_MNIST_FILES = (
    ("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9912422),
    ("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28881),
    ("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1648877),
    ("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4542),
)

# Where the SHA-256 come from: MNIST and EMNIST from tensorflow/datasets (url_checksums/mnist.txt, emnist.txt),
# CIFAR-10 from keras (datasets/cifar10.py). UCI publishes none for HAPT: the first download is trusted and its
# SHA-256 recorded in the cache, and a later download must have the same one.
SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="digits",
            description="handwritten digits, 8x8 grey; ships inside scikit-learn, no download",
            kind="image",
            classes=10,
            shape=(1, 8, 8),
            samples="1,437 / 360",
            homepage="https://archive.ics.uci.edu/dataset/80",
            licence="CC BY 4.0",
            citation="Alpaydin, Kaynak: Optical Recognition of Handwritten Digits, UCI 1998",
        ),
        Source(
            name="mnist",
            description="handwritten digits, 28x28 grey",
            kind="image",
            classes=10,
            shape=(1, 28, 28),
            samples="60,000 / 10,000",
            homepage="http://yann.lecun.com/exdb/mnist",
            licence="none stated by its authors; Keras says CC BY-SA 3.0",
            citation="LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition, 1998",
            files=tuple(
                RemoteFile(name, tuple(f"{mirror}/{name}" for mirror in _MNIST_MIRRORS), sha256, size_bytes)
                for name, sha256, size_bytes in _MNIST_FILES
            ),
        ),
        Source(
            name="emnist",
            description="handwritten letters and digits, the balanced split, 28x28 grey",
            kind="image",
            classes=47,
            shape=(1, 28, 28),
            samples="112,800 / 18,800",
            homepage="https://www.nist.gov/itl/products-and-services/emnist-dataset",
            licence="none stated (NIST)",
            citation="Cohen, Afshar, Tapson, van Schaik: EMNIST, an extension of MNIST to handwritten letters, 2017",
            files=(
                RemoteFile(
                    "gzip.zip",
                    (
                        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                        "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
                    ),
                    "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
                    561753746,
                ),
            ),
        ),
        Source(
            name="cifar10",
            description="photographs of 10 kinds of things, 32x32 colour",
            kind="image",
            classes=10,
            shape=(3, 32, 32),
            samples="50,000 / 10,000",
            homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
            licence="none stated",
            citation="Krizhevsky: Learning multiple layers of features from tiny images, 2009",
            files=(
                RemoteFile(
                    "cifar-10-python.tar.gz",
                    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
                    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                    170498071,
                ),
            ),
        ),
        Source(
            name="femnist",
            description="handwritten letters and digits by writer, 28x28 grey",
            kind="image",
            classes=62,
            shape=(1, 28, 28),
            on_white=True,
            samples="805,263 in LEAF's full set",
            homepage="https://leaf.cmu.edu",
            licence="BSD 2-Clause (LEAF)",
            citation="Caldas et al.: LEAF, a benchmark for federated settings, 2018",
            by_hand=(
                "LEAF's pipeline makes it (github.com/TalwalkarLab/leaf, in data/femnist: "
                "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample); then run `dfca data import FOLDER` "
                "on its data folder"
            ),
        ),
        Source(
            name="har",
            description="smartphone acceleration and gyroscope by subject, 128 samples at 50 Hz, 6 activities",
            kind="window",
            classes=6,
            shape=(6, 128),
            samples="about 10,000 of 30 subjects",
            homepage="https://archive.ics.uci.edu/dataset/341",
            licence="CC BY 4.0",
            citation="Reyes-Ortiz, Oneto, Samà, Parra, Anguita: Transition-aware human activity recognition, 2016",
            files=(
                RemoteFile(
                    "hapt.zip",
                    (
                        "https://archive.ics.uci.edu/static/public/341/smartphone+based+recognition+of+human+"
                        "activities+and+postural+transitions.zip",
                        "https://archive.ics.uci.edu/ml/machine-learning-databases/00341/HAPT%20Data%20Set.zip",
                    ),
                    None,
                    None,
                ),
            ),
        ),
    )
}


GENERATED: dict[str, Source] = {
    "forecast": Source(
        name="forecast",
        description="vibration sensors whose next value is to be forecast; made when it is needed, no download",
        kind="series",
        classes=1,
        shape=(1, 16),
        samples="200 / 100 per client, or as many as asked for",
        homepage="dfca itself (data/forecast.py)",
        licence="that of dfca",
        citation="none",
        task="regression",
    )
}
"""Data sets that have no files."""


def source_of(name: str) -> Source:
    """Look a data set up by name.

    Raises ConfigError with the near matches for a name that does not exist.
    """
    if name not in SOURCES and name not in GENERATED:
        raise unknown("dataset", name, (*SOURCES, *GENERATED))
    return SOURCES.get(name) or GENERATED[name]
