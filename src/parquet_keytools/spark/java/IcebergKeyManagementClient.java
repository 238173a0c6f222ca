package parquet_keytools;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Base64;
import java.util.Map;
import org.apache.iceberg.encryption.KeyManagementClient;

/**
 * Iceberg's door to the KMS clients of parquet-keytools, for the catalog property encryption.kms-impl: KEKs of tables
 * are wrapped as the bare ciphertext of the KMS, as the Python side does, by the same worker process in Python.
 *
 * It travels to executors with tables, and has no keys and no secrets: of all properties of the catalog it keeps the
 * place of the configuration and the name of a program.
 */
public class IcebergKeyManagementClient implements KeyManagementClient {
  private static final long serialVersionUID = 1L;
  private static final String CONFIG = "keytools.config";
  private static final String CONFIG_VARIABLE = "PARQUET_KEYTOOLS_CONFIG";
  private static final String PYTHON = "keytools.python";
  private static final long TIMEOUT_MILLISECONDS = 120000;

  private String config;
  private String python;

  public void initialize(Map properties) {
    config = given((String) properties.get(CONFIG), System.getenv(CONFIG_VARIABLE));
    if (config == null || config.isEmpty()) {
      throw new IllegalArgumentException(
          "The catalog has no property " + CONFIG + ", and the environment no variable " + CONFIG_VARIABLE
              + ": set one to the YAML file with the KMS, on every node.");
    }
    // Where none is given, that of each node.
    python = (String) properties.get(PYTHON);
  }

  /** Returns a KEK as the KMS wraps it; the worker has unwrapped it again, and compared. */
  public ByteBuffer wrapKey(ByteBuffer key, String wrappingKeyId) {
    return ByteBuffer.wrap(ask(KmsWorker.WRAP_KEK, "wrap", key, wrappingKeyId));
  }

  public ByteBuffer unwrapKey(ByteBuffer wrappedKey, String wrappingKeyId) {
    return ByteBuffer.wrap(ask(KmsWorker.UNWRAP_KEK, "unwrap", wrappedKey, wrappingKeyId));
  }

  /** Returns false: Iceberg generates KEKs, with its own random numbers. */
  public boolean supportsKeyGeneration() {
    return false;
  }

  /** Does nothing: the worker belongs to all of this JVM, and ends with it. */
  public void close() {}

  private byte[] ask(int operation, String name, ByteBuffer key, String wrappingKeyId) {
    if (key == null || wrappingKeyId == null || wrappingKeyId.isEmpty()) {
      throw new IllegalArgumentException(
          "Cannot " + name + " a key of the table: it has no " + (key == null ? "key" : "property encryption.key-id")
              + ".");
    }
    // The caller's buffer stays where it is.
    byte[] bytes = new byte[key.remaining()];
    ((ByteBuffer) key.duplicate()).get(bytes);
    try {
      return worker().askForKey(operation, bytes, wrappingKeyId);
    } finally {
      Arrays.fill(bytes, (byte) 0);
    }
  }

  private KmsWorker worker() {
    if (config == null) {
      throw new IllegalStateException("The KMS client was not initialized with the properties of a catalog.");
    }
    // As carried_file in Python writes it.
    String text = new ObjectMapper().createObjectNode().put("load", config).toString();
    String encoded = Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
    String program = given(python, System.getenv("PYSPARK_PYTHON"));
    return KmsWorker.of(encoded, given(program, "python3"), TIMEOUT_MILLISECONDS);
  }

  private static String given(String value, String otherwise) {
    return value == null || value.isEmpty() ? otherwise : value;
  }
}
