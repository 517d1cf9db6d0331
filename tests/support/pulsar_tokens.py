"""Keys and tokens that the tool `pulsar tokens` of Apache Pulsar 5.0.0-M1 made.

The subject is `joe`; there is no expiry.  Keys are base64 of the files that the tool wrote: the
bytes of a secret, or DER.
"""

from typing import Final, NamedTuple


class Made(NamedTuple):
    """A key, as brokers have it, and a token that is signed with it."""

    key: str
    token: str


SECRETS: Final = {
    "HS256": Made(
        ("VmkreRYX68B6Rna0i6nOHPuEM5QJSM/fLqrwog9zhUI="),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJqb2UifQ.SXe-Pbm93sRH21xnk3tGRzHKK9jxjZucUiiBZA05qns"),
    ),
    "HS384": Made(
        ("wvORYjt2CaJPSQiMTgzdMv3lkQZ1J+9EXBxC0c5fY5DvpWTJQoRXESnmv1843UNc"),
        (
            "eyJhbGciOiJIUzM4NCJ9.eyJzdWIiOiJqb2UifQ.aZfmD51uQTIOsbOzJUcFiXc4dZNvCSn_HmRumUyG"
            "exzkZ0RmPOM4O0tway3V__0I"
        ),
    ),
    "HS512": Made(
        (
            "JoRnpKn8C1XPGIJ8Sv0hJ9bENG24Sz6cWEAIaYlX3YtwAJrhDeyibF7YIevWqYssjDG2s0xWqEgteIGp"
            "du19MQ=="
        ),
        (
            "eyJhbGciOiJIUzUxMiJ9.eyJzdWIiOiJqb2UifQ.wUFEORX3zVnz3z9p6Ks6S-"
            "qi23BFlmP2eL379tP_RgnFdUmvL5qhD2nYpaKwoXqa8jkOpQy8mZUSY4AuFUkESA"
        ),
    ),
}

PUBLIC_KEYS: Final = {
    "RS256": Made(
        (
            "MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEAmoZTtzr2NqrTv3ROz8bi8cvvVKdjU6NZpW3w"
            "yKEX66hLbWFjXvBbJ3AyDSLMzLfNkjzJY1cApxdfbvdFJK6RwL+DjZrGQOW8cGkJmTwC6kT+TP95vgg5"
            "fZxiBV5ITbkfaVYMGBwIOGz9G4ImuHvp70Nz7auPrWCoNGUzue56hmiFx9tnXS5cV/Kww+cB7q5DaNCH"
            "vIQavhoRD/b0AXCA0GTmHfZVAYV1hP7gljH8DuvETtFMlyWnpTX0Aq7lhiphcuwzmZ9L1acs2Wwe6YuD"
            "5A+x9360Va88UQI0TAMiYQm1vmWDti2EvCMH7yIz6RWrLOMvvg1M1N0PV1CoRY+cxQIDAQAB"
        ),
        (
            "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJqb2UifQ.Ae2IJ_Uw8XyI4gy9X3seY1chaFQNxKPWsKTMaLzR"
            "Okinej4OWaLQIq6wXr_21rRbY4eemaPI0rkLz6Mbzb6gu4coxrP5vbIMsAFGbmgwZBzouN_12o3CNaBd"
            "rBKV3aq8oSToVhvkEkVt6vku8irySz-Lbb4qJbcWJCR4yRYdL2vcR5AVbBh8_pi4mKDktYTuVZEwlx-"
            "QGvMjqSkO3lN9SYrxD2z2DfiiOW-wRVg0mepwX6sEOzSmuisOplf7fmQOYyOMA_gOmEKVRD1LTtxr1sz"
            "0nFsVDECbdAVlp9utquCEUwU2frM49ADkg7dTK0pQZ_S_bWec2I4UVWlBVyGdzw"
        ),
    ),
    "ES256": Made(
        (
            "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAErAg4QMgOFJi1l3Qau92hK376/3N1u8sdunqGTFkydkSq"
            "IUik7eroatZnjo6g/+LtgZ5+svk4NyGsgIPW1/AMFQ=="
        ),
        (
            "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJqb2UifQ.qT-dTD9tUK-1NsYh5Oy_WmaXcK41Ex3GN-"
            "Zc1eEE04Zdrfu7TrG-y3sBdYVFX4BMpvlBCWY0XdfNbZxepygvVg"
        ),
    ),
    "ES384": Made(
        (
            "MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAEsZ4u95gZTNkQu1g18ZBxVbRAX38jJ5t2qCDsA1v2BknRabFk"
            "blxOnUEcnEDkT6hJ2xyaB08gNMCdkFU6Sc+ChjD6ln46gGie8xJHRL70K59SYpX5vtbFPZHJsR52g0gS"
        ),
        (
            "eyJhbGciOiJFUzM4NCJ9.eyJzdWIiOiJqb2UifQ.BE94BWszEO_gazw8yC4r-"
            "zTK_KHhM82C5LJCZiyOJhyGgXTyeGbWpHMYd4OiOeJfELUeUJD7mRLqtSFViuIFY-"
            "jtSaysD8q7yPL95MTckEUfc-6xS8VR7DTjiqvUYMHd"
        ),
    ),
    "ES512": Made(
        (
            "MIGbMBAGByqGSM49AgEGBSuBBAAjA4GGAAQAR1nklqtvLmkBAQKodeivVTC9lHntKNCQhSfsd7vJmVXC"
            "zr2KdtR0GnkzlKxXmLJ7y6fudronaejWNO95yuN46qMB33NOCHXzw1niSiIHSUZLSe93FtrHsKDgm6KP"
            "NSf8yPmQH/DK5R9zOGhCAlxZ4+Dtyau8mM9n3oD9AZydITGAuOQ="
        ),
        (
            "eyJhbGciOiJFUzUxMiJ9.eyJzdWIiOiJqb2UifQ.Ad3VYzVUXjnB_7AqBazO1gg-LFm8_kH6_HlGsgRn"
            "Uel7hn2PTlkEyCx0a3DMiI_xu3CqbSdveZR4XIFlDbS2UH0jAPgDPt__4KhRN937dDuu0KvxAdl4__Wh"
            "j5Gpi9fDJRkK9JkIv61EoO5ukZpX0Eiw61e-dxfHlZvmQYG-KWzRxsBS"
        ),
    ),
}

ES256_PRIVATE_KEY: Final = (
    "MEECAQAwEwYHKoZIzj0CAQYIKoZIzj0DAQcEJzAlAgEBBCCztNSGi9CUzKrBicWJL5zJ6cmOK1ryuZJp3OG0J30yCQ=="
)
"""Of the public key above; the tool writes it without that one."""

EXPIRING_WITH_HEADERS: Final = (
    "eyJraWQiOiJrMSIsIngiOiIyIiwiYWxnIjoiSFMyNTYifQ"
    ".eyJzdWIiOiJqb2UiLCJleHAiOjE3OTU3MjQyOTl9"
    ".1TInXWkZ2uw5YwFX3VuwXdy09uZBY0_o7aolG-BxRxA"
)
"""Of the secret for HS256, with the headers `kid=k1` and `x=2`; it expires at 1795724299."""
