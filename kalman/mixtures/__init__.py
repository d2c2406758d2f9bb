"""Mixtures of Gaussian, Poisson, Bernoulli or categorical components: the density of independent rows.

They are learned online and in batch.
`families` and `categorical` hold the densities of one component, `components` their mixture; `online` is the filter,
`batch` is EM over many rows, `building` reads definitions.
"""
