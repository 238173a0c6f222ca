package parquet_keytools;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.util.Arrays;
import java.util.Base64;
import javax.crypto.AEADBadTagException;
import javax.crypto.Cipher;
import javax.crypto.spec.GCMParameterSpec;
import javax.crypto.spec.SecretKeySpec;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.crypto.AesCipher;
import org.apache.parquet.crypto.AesMode;
import org.apache.parquet.crypto.ModuleCipherFactory;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.format.EncryptionAlgorithm;
import org.apache.parquet.format.FileCryptoMetaData;
import org.apache.parquet.format.FileMetaData;
import org.apache.parquet.format.Util;

/** The footer of a Parquet file as it lies there. Nothing of it is authentic before `open`. */
final class FileTail {
  private static final int NONCE_LENGTH = 12;
  private static final int TAG_LENGTH = 16;
  private static final int SIGNATURE_LENGTH = NONCE_LENGTH + TAG_LENGTH;
  private static final int FIRST_READ = 1 << 16;

  /** What the file says of its encryption; null in a plaintext file. */
  final EncryptionAlgorithm algorithm;
  /** Key metadata of the footer's key; empty where there is none. */
  final byte[] footerKeyMetadata;

  private final String name;
  private final byte[] footer;
  /** Where the encrypted footer begins; -1 with a plaintext footer. */
  private final int encryptedFrom;
  private final FileMetaData plaintext;

  private FileTail(String name, byte[] footer, boolean isEncrypted) throws IOException {
    this.name = name;
    this.footer = footer;
    ByteArrayInputStream stream = new ByteArrayInputStream(footer);
    byte[] keyMetadata;
    if (isEncrypted) {
      FileCryptoMetaData crypto = Util.readFileCryptoMetaData(stream);
      algorithm = crypto.getEncryption_algorithm();
      keyMetadata = crypto.getKey_metadata();
      encryptedFrom = footer.length - stream.available();
      plaintext = null;
    } else {
      plaintext = Util.readFileMetaData(stream);
      algorithm = plaintext.getEncryption_algorithm();
      keyMetadata = plaintext.getFooter_signing_key_metadata();
      encryptedFrom = -1;
    }
    footerKeyMetadata = keyMetadata == null ? new byte[0] : keyMetadata;
  }

  /** Reads the footer of a file, as parquet-java does afterwards. */
  static FileTail read(Configuration configuration, Path path) {
    try {
      FileSystem fileSystem = path.getFileSystem(configuration);
      long length = fileSystem.getFileStatus(path).getLen();
      FSDataInputStream stream = fileSystem.open(path);
      try {
        // Most footers are in the first read.
        byte[] end = new byte[(int) Math.min(length, FIRST_READ)];
        stream.readFully(length - end.length, end);
        if (end.length < 8) {
          throw new IOException("it is no Parquet file");
        }
        String magic = new String(end, end.length - 4, 4, StandardCharsets.US_ASCII);
        boolean isEncrypted = magic.equals("PARE");
        int footerLength = ByteBuffer.wrap(end, end.length - 8, 4).order(ByteOrder.LITTLE_ENDIAN).getInt();
        if (footerLength < 0 || footerLength > length - 8 || !isEncrypted && !magic.equals("PAR1")) {
          throw new IOException("it is no Parquet file");
        }
        byte[] footer;
        if (footerLength <= end.length - 8) {
          footer = Arrays.copyOfRange(end, end.length - 8 - footerLength, end.length - 8);
        } else {
          footer = new byte[footerLength];
          stream.readFully(length - 8 - footerLength, footer);
        }
        return new FileTail(path.getName(), footer, isEncrypted);
      } finally {
        stream.close();
      }
    } catch (IOException error) {
      throw new ParquetCryptoRuntimeException("The footer of " + path.getName() + " cannot be read", error);
    }
  }

  boolean isPlaintextFile() {
    return algorithm == null && encryptedFrom < 0;
  }

  boolean isCtr() {
    return algorithm != null && algorithm.isSetAES_GCM_CTR_V1();
  }

  /** Returns the name of the algorithm that the file states. */
  String algorithmName() {
    if (algorithm != null && algorithm.isSetAES_GCM_V1()) {
      return "AES_GCM_V1";
    }
    if (isCtr()) {
      return "AES_GCM_CTR_V1";
    }
    throw new ParquetCryptoRuntimeException(name + " states no algorithm that is known.");
  }

  /** Returns the AAD prefix that the file stores, or null. */
  byte[] storedAadPrefix() {
    return isCtr() ? algorithm.getAES_GCM_CTR_V1().getAad_prefix() : algorithm.getAES_GCM_V1().getAad_prefix();
  }

  /** Returns whether the file says that it has an AAD prefix that it does not store. */
  boolean mustSupplyAadPrefix() {
    return isCtr()
        ? algorithm.getAES_GCM_CTR_V1().isSupply_aad_prefix()
        : algorithm.getAES_GCM_V1().isSupply_aad_prefix();
  }

  /** Returns the file unique, or null. */
  byte[] aadFileUnique() {
    return isCtr()
        ? algorithm.getAES_GCM_CTR_V1().getAad_file_unique()
        : algorithm.getAES_GCM_V1().getAad_file_unique();
  }

  static String digest(byte[] content) {
    try {
      return Base64.getEncoder().encodeToString(MessageDigest.getInstance("SHA-256").digest(content));
    } catch (GeneralSecurityException error) {
      throw new ParquetCryptoRuntimeException("There is no SHA-256", error);
    }
  }

  /** Returns the footer if it is authentic under a DEK and an AAD prefix, which may be empty; else returns null. */
  FileMetaData open(byte[] dek, byte[] prefix) {
    byte[] unique = aadFileUnique();
    byte[] fileAad = Arrays.copyOf(prefix, prefix.length + unique.length);
    System.arraycopy(unique, 0, fileAad, prefix.length, unique.length);
    byte[] aad = AesCipher.createFooterAAD(fileAad);
    try {
      if (encryptedFrom < 0) {
        return isSigned(dek, aad) ? plaintext : null;
      }
      ByteArrayInputStream stream = new ByteArrayInputStream(footer, encryptedFrom, footer.length - encryptedFrom);
      return Util.readFileMetaData(stream, ModuleCipherFactory.getDecryptor(AesMode.GCM, dek), aad);
    } catch (AEADBadTagException error) {
      return null;
    } catch (GeneralSecurityException error) {
      throw new ParquetCryptoRuntimeException("The footer of " + name + " cannot be verified", error);
    } catch (IOException error) {
      throw new ParquetCryptoRuntimeException("The footer of " + name + " cannot be read", error);
    } catch (ParquetCryptoRuntimeException error) {
      if (error.getCause() instanceof AEADBadTagException) {
        return null;
      }
      throw error;
    }
  }

  /** A plaintext footer is signed by the tag that encryption under the nonce after it gives (spec 5.2). */
  private boolean isSigned(byte[] dek, byte[] aad) throws GeneralSecurityException {
    int end = footer.length - SIGNATURE_LENGTH;
    if (end < 0) {
      return false;
    }
    Cipher cipher = Cipher.getInstance("AES/GCM/NoPadding");
    GCMParameterSpec nonce = new GCMParameterSpec(8 * TAG_LENGTH, footer, end, NONCE_LENGTH);
    cipher.init(Cipher.ENCRYPT_MODE, new SecretKeySpec(dek, "AES"), nonce);
    cipher.updateAAD(aad);
    byte[] encrypted = cipher.doFinal(footer, 0, end);
    byte[] tag = Arrays.copyOfRange(encrypted, encrypted.length - TAG_LENGTH, encrypted.length);
    byte[] signature = Arrays.copyOfRange(footer, end + NONCE_LENGTH, footer.length);
    return MessageDigest.isEqual(tag, signature);
  }
}
