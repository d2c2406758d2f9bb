"""Mixtures of Gaussian, Poisson, Bernoulli or categorical components, which describe the density of independent rows.

Mixtures are learned online or in batch. `families` and `categorical` contain the densities of one component,
`components` their mixture, `online` the filter, `batch` EM over many rows, and `building` the parser of definitions.
"""
