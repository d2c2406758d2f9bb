"""Mixtures of Gaussian, Poisson or Bernoulli components: the density of independent rows, learned online and in batch.

`families` holds the densities of one component, `components` their mixture; `online` is the filter, `batch` is EM over
many rows, `building` reads definitions.
"""
