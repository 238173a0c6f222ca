"""Good files: one for each feature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vector_kit.plain_file import summary_bytes
from vector_kit.sealed_file import FOOTER_KEY, Recipe
from vector_kit.vector import (
    SealedFile,
    Vector,
    as_metadata,
    base_columns,
    data_key,
    key_material,
    recipe,
    reference,
)


def kms_recipe(
    seed: int,
    *,
    footer: dict[str, Any] | None = None,
    column: dict[str, Any] | None = None,
    dek_length_bits: int = 256,
) -> Recipe:
    """Return a recipe whose keys are wrapped, with changes to the key material of footer and columns."""
    footer_key, column_key = data_key("kms footer", dek_length_bits), data_key("kms column", dek_length_bits)
    footer_material = key_material(seed, footer_key, **({"is_footer_key": True} | (footer or {})))
    column_material = key_material(seed + 1, column_key, **({"is_footer_key": False} | (column or {})))
    return recipe(
        seed,
        footer_key=footer_key,
        footer_key_metadata=as_metadata(footer_material),
        columns={0: (column_key, as_metadata(column_material)), 1: FOOTER_KEY, 2: FOOTER_KEY},
    )


def external_recipe(seed: int) -> tuple[Recipe, bytes]:
    """Return a recipe with external key material, and the key material file."""
    footer_key, column_key = data_key("kms footer"), data_key("kms column")
    materials = {
        "footerKey": key_material(seed, footer_key, is_footer_key=True, internal=False),
        "columnKey0": key_material(seed + 1, column_key, is_footer_key=False, internal=False),
    }
    made = recipe(
        seed,
        footer_key=footer_key,
        footer_key_metadata=reference("footerKey"),
        columns={0: (column_key, reference("columnKey0")), 1: FOOTER_KEY, 2: FOOTER_KEY},
    )
    return made, json.dumps({name: json.dumps(material) for name, material in materials.items()}).encode()


def good_vectors() -> Iterator[Vector]:
    """Yield all good vectors; a file whose feature implies a weakness says so."""

    def one(
        name: str, title: str, made: Recipe, *, broken: str = "", expected: Any = None, **plain: Any
    ) -> Vector:
        return Vector(
            f"good/{name}.parquet",
            title,
            {f"{name}.parquet": SealedFile(made, plain)},
            frozenset(broken.split()),
            expected=expected or {},
            features=(name,),
        )

    yield one("column-keys", "Columns under keys of their own and under the footer's", recipe(1))
    yield one(
        "uniform", "All columns under the footer's key", recipe(2, columns=dict.fromkeys(range(3), FOOTER_KEY))
    )
    partial = {1: base_columns()[1]}
    yield one("partial", "One column encrypted, the others plaintext", recipe(3, columns=partial))
    yield one(
        "plaintext-footer", "Signed plaintext footer", recipe(4, plaintext_footer=True), broken="names-visible"
    )
    yield one(
        "plaintext-footer-partial",
        "Signed plaintext footer, plaintext columns",
        recipe(5, plaintext_footer=True, columns=partial),
        broken="names-visible",
    )
    yield one("ctr", "AES_GCM_CTR_V1", recipe(6, is_ctr=True), broken="ctr")
    yield one(
        "ctr-plaintext-footer",
        "AES_GCM_CTR_V1, signed plaintext footer",
        recipe(7, is_ctr=True, plaintext_footer=True),
        broken="ctr names-visible",
    )
    yield one("v2-pages", "Data pages V2", recipe(8), v2=True, compression="snappy")
    yield one("nested", "A list", recipe(9, columns={**base_columns(), 3: base_columns()[0]}), nested=True)
    yield one("crc", "Pages with CRCs", recipe(10), crc=True)
    yield one("ctr-crc", "AES_GCM_CTR_V1 with CRCs", recipe(11, is_ctr=True), broken="ctr", crc=True)
    yield one("ctr-zstd", "AES_GCM_CTR_V1, compressed", recipe(26, is_ctr=True), broken="ctr", compression="zstd")
    v2_ctr = recipe(27, is_ctr=True)
    yield one("ctr-v2-pages", "AES_GCM_CTR_V1, data pages V2", v2_ctr, broken="ctr", v2=True, compression="snappy")
    yield one("zstd", "Compressed pages", recipe(12), compression="zstd")
    yield one("no-rows", "No row group", recipe(13), rows=0)
    supplied = recipe(14, store_aad_prefix=False)
    yield one("prefix-supplied", "AAD prefix not stored", supplied, expected={"aad_prefix": "kit"})
    delimited = recipe(15, aad_prefix=b"kit\0", store_aad_prefix=False)
    yield one("prefix-delimited", "AAD prefix with NUL at its end", delimited, expected={"aad_prefix": "kit"})
    without = {0: (data_key("k1"), None), 1: (data_key("k2"), None), 2: FOOTER_KEY}
    yield one(
        "no-key-metadata",
        "No key metadata: the caller knows the keys",
        recipe(16, footer_key_metadata=None, columns=without),
        expected={"keys_without_metadata": {"footer": "kf", "columns": {"id": "k1", "name": "k2"}}},
    )
    yield one("double-wrapping", "Key material inside, double wrapping", kms_recipe(17))
    single = {"kek_length_bits": None}
    yield one(
        "single-wrapping", "Key material inside, single wrapping", kms_recipe(19, footer=single, column=single)
    )
    made, materials = external_recipe(21)
    yield Vector(
        "good/external.parquet",
        "Key material in the file beside it",
        {"external.parquet": SealedFile(made), "_KEY_MATERIAL_FOR_external.parquet.json": materials},
        features=("external",),
    )
    files = {
        f"part-{n}.parquet": SealedFile(recipe(23 + n, f".{n}", aad_prefix=f"kit.part{n}".encode()))
        for n in range(3)
    }
    yield Vector("good/data-set", "Three parts", files, expected={"parts": 3}, is_folder=True, features=("parts",))
    yield Vector("good/data-set-of-any-size", "Three parts, of nobody knows how many", files, is_folder=True)
    yield Vector(
        "good/data-set-with-summary",
        "Three parts, and a summary file that lists them",
        {**files, "_metadata": summary_bytes(list(files))},
        frozenset({"summary-file"}),
        is_folder=True,
    )
