"""Random tests of every public operator, against float64 references that are written from the documentation.

    python -m tests.fuzz --seconds 60 --seed 1                                    # all operators on the CPU
    python -m tests.fuzz --seconds 600 --seed 2 --device cuda --family attention_paged
    python -m tests.fuzz --device cuda --seed 2 --case attention_paged:1234       # one case again

A case is named FAMILY:INDEX; with the seed, the name decides on everything: the call, its contents, the views it is made with, and the
modes in which it is run. Nothing here knows minfer's own references or checks.

What a case is

* legal: the result is compared with the truth (``compare``: every element, and the norm). Then the call is made again in other ways
  (``modes``), which must give the same bits: beside a busy stream, from a CUDA graph whose operands are then changed, from four threads,
  as the first thing that a thread does. Operands are views in storages full of NaN (``arena``), whose bits must not change.
* bad: a legal call changed in one place so that it cannot be right (``bad_calls``): it must raise, and say why.
* hostile: a legal call with an index that leads outside of the tensors. On CUDA no memory but the results' may change, and values stay
  right where they are defined; the CPU raises.

Where things are

* ``__main__`` the command line; ``supervisor`` watches ``worker``, the process that runs cases; ``runner`` one case; ``modes`` ways to run
  it
* ``draw`` distributions, seeded by a text; ``arena`` operands amid NaN; ``compare`` when a result is right
* ``family`` what the driver knows of an operator; ``families/`` the operators; ``truth/`` what they compute, in float64, and error models
* ``bad_calls``, ``late_writer`` operands that are written just before they are read; ``injected`` bugs that must be found

To add an operator, write a ``Family`` in ``families/`` and list it in ``families/__init__``: ``draw`` decides on shapes, dtypes and
options in JSON-like values; ``fill`` gives the tensors, with garbage in all that nobody may look at; ``call`` calls ``minfer.<name>``;
``expect`` gives the float64 truth and a bound for each element, with the reason for every term; ``views`` says which views an argument may
be; ``arguments`` and ``wrong_options`` what cannot be right; ``hostile`` what leads outside. Then inject a bug or two for it
(``injected``).
"""
