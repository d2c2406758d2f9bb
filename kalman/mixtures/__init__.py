"""Mixtures of Gaussian, Poisson or Bernoulli components: the density of independent rows, learned online and in batch.

`families` says what one component is, `components` what they are together; `online` is the filter, `batch` and
`learner` are EM over many rows, `building` reads definitions.
"""
