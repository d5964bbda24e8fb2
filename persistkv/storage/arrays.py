"""The type of arrays of bytes. Importing it imports NumPy, which takes longer than what most commands do."""

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
