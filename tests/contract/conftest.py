import pytest

pytest.register_assert_rewrite("parquet_keytools.kms.contract_tests")
