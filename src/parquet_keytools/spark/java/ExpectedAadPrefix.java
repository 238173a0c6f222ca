package parquet_keytools;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;

/**
 * The AAD prefix that a file must have: its text with NUL at its end, or without for files written before. The AAD is
 * prefix and file unique without a boundary, so that the file unique must have its length; see
 * docs/aad-prefix-boundary.md and encryption/aad.py, which does the same.
 */
final class ExpectedAadPrefix {
  private static final String AAD_PREFIX = "parquet.keytools.aad.prefix";
  private static final String FILE_UNIQUE_LENGTHS = "parquet.keytools.file.unique.lengths";
  private static final int FILE_UNIQUE_LENGTH = 8;
  private static final int MOST_MODULE_TYPE = 9;

  /** Begins the form of a prefix that is bytes; see encryption/aad.py. */
  private static final String BASE64 = "base64:";

  private final Path path;
  private final boolean isAnyFileUnique;

  /** With NUL at its end; null where any prefix will do. */
  private byte[] written = null;

  /** Without; null where it could be the beginning of another prefix. */
  private byte[] older = null;

  /** Takes the text of the read's option, or else of the table, in which {file_name} stands for the file's name. */
  ExpectedAadPrefix(Configuration configuration, String ofTable, Path path) {
    this.path = path;
    isAnyFileUnique = "any".equals(configuration.get(FILE_UNIQUE_LENGTHS, "exact"));
    String template = configuration.get(AAD_PREFIX, ofTable);
    if (template.isEmpty()) {
      return;
    }
    byte[] bytes;
    if (template.startsWith(BASE64)) {
      bytes = Base64.getDecoder().decode(template.substring(BASE64.length()));
    } else {
      String text = template.replace("{file_name}", path.getName());
      if (text.indexOf('\0') >= 0) {
        throw new ParquetCryptoRuntimeException(
            "The AAD prefix of " + path.getName() + " contains NUL, which marks the end of a prefix. Give it without.");
      }
      bytes = text.getBytes(StandardCharsets.UTF_8);
    }
    boolean isDelimited = bytes[bytes.length - 1] == 0;
    written = isDelimited ? bytes : Arrays.copyOf(bytes, bytes.length + 1);
    // The configuration was checked: no prefix of a table begins another. One that somebody gives was not.
    older = !isDelimited && (!isAnyFileUnique || template.equals(ofTable)) ? bytes : null;
  }

  boolean isAny() {
    return written == null;
  }

  /** Returns the forms that the prefix of a file can have; parquet-java compares them with what the file stores. */
  List forms(FileTail tail) {
    ArrayList forms = new ArrayList();
    if (isAny()) {
      byte[] any = tail.storedAadPrefix();
      refuseAnotherModule(any == null ? new byte[0] : any, tail.aadFileUnique());
      return forms;
    }
    if (isAnyFileUnique) {
      // Nothing can have been moved into a prefix that is expected.
      refuseAnotherModule(new byte[0], tail.aadFileUnique());
    }
    int length = tail.aadFileUnique().length;
    if (length != FILE_UNIQUE_LENGTH && !isAnyFileUnique) {
      throw new ParquetCryptoRuntimeException(
          path.getName() + ": an AAD prefix is expected, and the file unique has " + length + " bytes, not "
              + FILE_UNIQUE_LENGTH + ": the end of another prefix may have been moved into it, or its own beginning out"
              + " of it. `reading.file_unique_lengths: any` accepts files of writers that use other lengths.");
    }
    byte[] stored = tail.storedAadPrefix();
    if (stored == null || Arrays.equals(stored, written)) {
      forms.add(written);
    }
    if (older != null && (stored == null || Arrays.equals(stored, older))) {
      forms.add(older);
    }
    if (forms.isEmpty()) {
      throw new ParquetCryptoRuntimeException(
          path.getName() + ": AAD Prefix in file and in decryption properties is not the same: it is another file, or of"
              + " another table.");
    }
    return forms;
  }

  /** Refuses an AAD under which that of another module is that of a footer; see encryption/aad.py. */
  private void refuseAnotherModule(byte[] prefix, byte[] fileUnique) {
    boolean isUsual = fileUnique.length == FILE_UNIQUE_LENGTH;
    for (int type = 1; type <= MOST_MODULE_TYPE; type++) {
      // Data pages and their headers have a page ordinal beside those of row group and column.
      int behind = type == 2 || type == 4 ? 6 : 4;
      boolean isBehind = fileUnique.length == FILE_UNIQUE_LENGTH + behind && fileUnique[FILE_UNIQUE_LENGTH] == type;
      boolean isPage = type == 2 || type == 3;
      if (isBehind || isPage && !(isUsual && prefix.length == 0) && endsAsPage(prefix, fileUnique, type, behind)) {
        throw new ParquetCryptoRuntimeException(
            path.getName() + ": the AAD prefix and the file unique of " + fileUnique.length + " bytes end as the AAD of"
                + " another module does, which was put in the place of the footer.");
      }
    }
  }

  private static boolean endsAsPage(byte[] prefix, byte[] fileUnique, int type, int behind) {
    byte[] whole = Arrays.copyOf(prefix, prefix.length + fileUnique.length);
    System.arraycopy(fileUnique, 0, whole, prefix.length, fileUnique.length);
    int start = whole.length - behind;
    // Ordinals are little-endian: their high bytes are 0 below 256.
    return start >= FILE_UNIQUE_LENGTH && whole[start] == type && whole[start + 2] == 0
        && (behind == 4 || whole[start + 4] == 0);
  }

  /** Returns what is different where another prefix is expected. */
  String identity() {
    return isAny() ? "" : isAnyFileUnique + " " + (older != null) + " " + Arrays.toString(written);
  }
}
