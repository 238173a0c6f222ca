import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.SecureRandom;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import javax.crypto.Cipher;
import javax.crypto.spec.GCMParameterSpec;
import javax.crypto.spec.SecretKeySpec;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.crypto.ColumnDecryptionProperties;
import org.apache.parquet.crypto.DecryptionPropertiesFactory;
import org.apache.parquet.crypto.FileDecryptionProperties;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.crypto.keytools.KmsClient;
import org.apache.parquet.hadoop.metadata.ColumnPath;

/**
 * Keys in Hadoop properties, as "name:base64,name:base64": for tests, where nothing is secret. Raw types, for
 * Janino does not know all of generics.
 */
public class InteropKeys {

  private static Map parse(String text) {
    Map keys = new HashMap();
    for (String entry : text.split(",")) {
      int colon = entry.indexOf(':');
      keys.put(entry.substring(0, colon), Base64.getDecoder().decode(entry.substring(colon + 1)));
    }
    return keys;
  }

  /** Wraps with AES-GCM, with the master key identifier as AAD: base64 of nonce, ciphertext and tag. */
  public static class Kms implements KmsClient {
    private Map masterKeys;

    public void initialize(Configuration configuration, String instanceId, String instanceUrl, String accessToken) {
      masterKeys = parse(configuration.get("interop.master.keys"));
    }

    public String wrapKey(byte[] key, String masterKeyId) {
      byte[] nonce = new byte[12];
      new SecureRandom().nextBytes(nonce);
      byte[] sealed = apply(Cipher.ENCRYPT_MODE, masterKeyId, nonce, key, 0);
      return Base64.getEncoder().encodeToString(ByteBuffer.allocate(12 + sealed.length).put(nonce).put(sealed).array());
    }

    public byte[] unwrapKey(String wrappedKey, String masterKeyId) {
      byte[] sealed = Base64.getDecoder().decode(wrappedKey);
      return apply(Cipher.DECRYPT_MODE, masterKeyId, sealed, sealed, 12);
    }

    private byte[] apply(int mode, String masterKeyId, byte[] nonce, byte[] input, int start) {
      try {
        Cipher cipher = Cipher.getInstance("AES/GCM/NoPadding");
        SecretKeySpec key = new SecretKeySpec((byte[]) masterKeys.get(masterKeyId), "AES");
        cipher.init(mode, key, new GCMParameterSpec(128, nonce, 0, 12));
        cipher.updateAAD(masterKeyId.getBytes(StandardCharsets.UTF_8));
        return cipher.doFinal(input, start, input.length - start);
      } catch (GeneralSecurityException exception) {
        throw new ParquetCryptoRuntimeException(exception);
      }
    }
  }

  /** Reads files with data keys that the caller knows. */
  public static class DataKeys implements DecryptionPropertiesFactory {
    public FileDecryptionProperties getFileDecryptionProperties(Configuration configuration, Path path) {
      FileDecryptionProperties.Builder builder = FileDecryptionProperties.builder();
      builder.withFooterKey((byte[]) parse(configuration.get("interop.footer.key")).get("footer"));
      String columns = configuration.get("interop.column.keys", "");
      if (!columns.isEmpty()) {
        Map keys = parse(columns);
        Map properties = new HashMap();
        for (Object dotted : keys.keySet()) {
          ColumnPath column = ColumnPath.fromDotString((String) dotted);
          properties.put(column, ColumnDecryptionProperties.builder(column).withKey((byte[]) keys.get(dotted)).build());
        }
        builder.withColumnKeys(properties);
      }
      String aadPrefix = configuration.get("interop.aad.prefix");
      if (aadPrefix != null) {
        builder.withAADPrefix(aadPrefix.getBytes(StandardCharsets.UTF_8));
      }
      return builder.build();
    }
  }
}
