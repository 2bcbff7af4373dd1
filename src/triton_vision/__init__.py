"""Triton Vision Suite, the operator's side: stages, repositories, the server, export and the command line.

Which part may import which: ``stages`` stand alone (they run inside Triton); ``repository`` and ``server`` know no
command line; ``export`` knows no server; ``accuracy`` knows ``repository``, ``export.weights`` and how the server's
processes are bound, and no command line; ``cli`` may use them all. The client is a distribution of its own,
``triton_vision_client``, and imports none of this.
"""

__version__ = "0.1.0"
