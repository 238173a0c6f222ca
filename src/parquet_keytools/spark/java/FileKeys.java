package parquet_keytools;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.crypto.keytools.KeyToolkit;

/**
 * The keys of one file: which master keys its key metadata name, and the DEKs, unwrapped under these.
 *
 * parquet-java keeps a KEK by the id that a file gives it: a file that names a master key, and the id of a KEK which
 * another master key wraps, would be opened without that master key. Here a KEK is kept by all that is said of it.
 */
final class FileKeys {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final int MOST_KEKS = 20000;
  private static final long MOST_MATERIAL_BYTES = 1L << 26;
  private static final Map KEKS = new HashMap();

  private final Configuration configuration;
  private final Path path;
  private final PythonKmsClient kms = new PythonKmsClient();
  private final String cacheName;
  private final long lifetimeMilliseconds;
  private final Map held = new HashMap();
  /** DEKs that the KMS unwrapped for this file, which is read once by us and once by parquet-java. */
  private final Map deks = new HashMap();
  private JsonNode externalMaterial = null;
  private String instanceId = null;

  FileKeys(Configuration configuration, Path path) {
    this.configuration = configuration;
    this.path = path;
    this.lifetimeMilliseconds = 1000L * configuration.getLong("parquet.encryption.cache.lifetime.seconds", 600);
    this.cacheName = configuration.get("parquet.encryption.key.access.token", "") + '\n'
        + configuration.get("parquet.keytools.session.identity", "");
    kms.initialize(configuration, null, null, null);
  }

  /** Returns the KMS of the file and the master key that some key metadata names; the footer's come first. */
  String masterKeyId(byte[] keyMetadata) {
    return masterKeyId(material(keyMetadata));
  }

  private synchronized String masterKeyId(JsonNode material) {
    JsonNode isFooterKey = (JsonNode) material.get("isFooterKey");
    JsonNode named = (JsonNode) material.get("kmsInstanceID");
    if (instanceId == null && isFooterKey != null && isFooterKey.asBoolean() && named != null) {
      instanceId = named.asText();
    }
    return PythonKmsClient.named(instanceId, text(material, "masterKeyID"));
  }

  /** Returns the DEK that some key metadata means. */
  synchronized byte[] dek(byte[] keyMetadata) {
    JsonNode material = material(keyMetadata);
    String masterKeyId = masterKeyId(material);
    String wrappedDek = text(material, "wrappedDEK");
    if (!flag(material, "doubleWrapping")) {
      String name = masterKeyId + '\n' + wrappedDek;
      if (!deks.containsKey(name)) {
        deks.put(name, kms.unwrapKey(wrappedDek, masterKeyId));
      }
      return (byte[]) deks.get(name);
    }
    String kekId = text(material, "keyEncryptionKeyID");
    byte[] kek = kek(kekId, text(material, "wrappedKEK"), masterKeyId);
    try {
      return KeyToolkit.decryptKeyLocally(wrappedDek, kek, Base64.getDecoder().decode(kekId));
    } catch (IllegalArgumentException error) {
      throw malformed("it is not base64");
    }
  }

  private byte[] kek(String kekId, String wrappedKek, String masterKeyId) {
    String name = cacheName + '\n' + kekId + '\n' + masterKeyId + '\n' + wrappedKek;
    byte[] ofThisFile = (byte[]) held.get(name);
    if (ofThisFile != null) {
      return ofThisFile;
    }
    Kek kek;
    synchronized (KEKS) {
      if (KEKS.size() >= MOST_KEKS) {
        KEKS.clear();
      }
      kek = (Kek) KEKS.get(name);
      if (kek == null) {
        kek = new Kek();
        KEKS.put(name, kek);
      }
    }
    // Tasks that need the same one wait for one answer of the KMS.
    synchronized (kek) {
      long now = System.nanoTime() / 1000000L;
      if (kek.key == null || now - kek.since >= lifetimeMilliseconds) {
        kek.key = null;
        kek.key = kms.unwrapKey(wrappedKek, masterKeyId);
        kek.since = now;
      }
      held.put(name, kek.key);
      return kek.key;
    }
  }

  private JsonNode material(byte[] keyMetadata) {
    JsonNode found = parsed(new String(keyMetadata, StandardCharsets.UTF_8));
    if (!flag(found, "internalStorage")) {
      String reference = text(found, "keyReference");
      JsonNode entry = (JsonNode) externalMaterial().get(reference);
      if (entry == null || !entry.isTextual()) {
        throw malformed("the key material file has no " + reference);
      }
      found = parsed(entry.asText());
    }
    return found;
  }

  private JsonNode parsed(String json) {
    JsonNode found;
    try {
      found = JSON.readTree(json);
    } catch (IOException error) {
      // Its text quotes what it read.
      found = null;
    }
    JsonNode type = found == null || !found.isObject() ? null : (JsonNode) found.get("keyMaterialType");
    if (type == null || !type.isTextual() || !"PKMT1".equals(type.asText())) {
      throw malformed("it is no key material of type PKMT1; Spark takes no data keys that the caller manages");
    }
    return found;
  }

  private String text(JsonNode material, String field) {
    JsonNode found = (JsonNode) material.get(field);
    if (found == null || !found.isTextual()) {
      throw malformed("there is no " + field);
    }
    return found.asText();
  }

  private boolean flag(JsonNode material, String field) {
    JsonNode found = (JsonNode) material.get(field);
    if (found == null || !found.isBoolean()) {
      throw malformed("there is no " + field);
    }
    return found.asBoolean();
  }

  private ParquetCryptoRuntimeException malformed(String what) {
    return new ParquetCryptoRuntimeException("Key metadata of " + path.getName() + " is malformed: " + what + ".");
  }

  private synchronized JsonNode externalMaterial() {
    if (externalMaterial == null) {
      Path file = new Path(path.getParent(), "_KEY_MATERIAL_FOR_" + path.getName() + ".json");
      try {
        FileSystem fileSystem = path.getFileSystem(configuration);
        long length = fileSystem.getFileStatus(file).getLen();
        if (length > MOST_MATERIAL_BYTES) {
          throw new IOException("it has " + length + " bytes");
        }
        FSDataInputStream stream = fileSystem.open(file);
        try {
          byte[] content = new byte[(int) length];
          stream.readFully(0, content);
          externalMaterial = JSON.readTree(content);
        } finally {
          stream.close();
        }
      } catch (IOException error) {
        throw new ParquetCryptoRuntimeException("The key material " + file.getName() + " cannot be read", error);
      }
      if (externalMaterial == null || !externalMaterial.isObject()) {
        throw malformed("the key material file is no JSON object");
      }
    }
    return externalMaterial;
  }

  private static final class Kek {
    byte[] key = null;
    long since = 0;
  }
}
