package parquet_keytools;

import java.nio.charset.StandardCharsets;
import java.util.TreeSet;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.column.ColumnDescriptor;
import org.apache.parquet.column.ParquetProperties.WriterVersion;
import org.apache.parquet.crypto.FileDecryptionProperties;
import org.apache.parquet.crypto.FileEncryptionProperties;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.crypto.keytools.PropertiesDrivenCryptoFactory;
import org.apache.parquet.hadoop.ParquetOutputFormat;
import org.apache.parquet.hadoop.api.WriteSupport;

/**
 * parquet-java's own factory, less what it lets through in silence: files without encryption, columns that nobody
 * thought of, levels of V2 pages in plaintext, and plaintext files in place of encrypted ones.
 */
public class KeytoolsCryptoFactory extends PropertiesDrivenCryptoFactory {
  private static final String PLAINTEXT_WRITES = "parquet.keytools.plaintext.writes";
  private static final String PLAINTEXT_READS = "parquet.keytools.plaintext.reads";
  private static final String COLUMNS = "parquet.keytools.columns";
  private static final String TABLE = CheckedFile.TABLE;
  private static final String OPTIONS_IDENTITY = "parquet.keytools.options.identity";
  private static final String SESSION_IDENTITY = "parquet.keytools.session.identity";
  private static final String CTR_FILES = "parquet.keytools.ctr.files";
  private static final String HINT = "Give the write .options(**keytools.spark_options(table, df.schema))";

  public FileEncryptionProperties getFileEncryptionProperties(
      Configuration configuration, Path path, WriteSupport.WriteContext context) {
    if (!isSet(configuration, FOOTER_KEY_PROPERTY_NAME)
        && !isSet(configuration, COLUMN_KEYS_PROPERTY_NAME)
        && !isSet(configuration, UNIFORM_KEY_PROPERTY_NAME)) {
      if (isAllowed(configuration, PLAINTEXT_WRITES)) {
        return null;
      }
      throw new ParquetCryptoRuntimeException(
          path.getName() + " would be written in plaintext. " + HINT + ", or " + PLAINTEXT_WRITES
              + "=allow where plaintext is meant.");
    }
    // The same text as parquet-java reads; it knows `v2` as a name for PARQUET_2_0.
    String version = configuration.get("parquet.writer.version", WriterVersion.PARQUET_1_0.toString());
    if (WriterVersion.fromString(version) != WriterVersion.PARQUET_1_0) {
      throw new ParquetCryptoRuntimeException(
          "parquet-java leaves the levels of V2 data pages in plaintext: which values are null, and how long lists are. "
              + "Leave parquet.writer.version at PARQUET_1_0.");
    }
    if (!configuration.getBoolean("parquet.encryption.key.material.store.internally", true)) {
      throw new ParquetCryptoRuntimeException(
          "External key material may be left behind when a committer moves files. Leave key material internal.");
    }
    if (configuration.getBoolean(PLAINTEXT_FOOTER_PROPERTY_NAME, false)) {
      throw new ParquetCryptoRuntimeException(
          "A plaintext footer of parquet-java shows size statistics of encrypted columns: how many values are null, and"
              + " how long all are together. Let Spark write plaintext files, and encrypt these with"
              + " `parquet-keytools spark encrypt`.");
    }
    if (ParquetOutputFormat.getJobSummaryLevel(configuration) != ParquetOutputFormat.JobSummaryLevel.NONE) {
      throw new ParquetCryptoRuntimeException(
          "A summary file would show the statistics of encrypted columns in plaintext. "
              + "Leave parquet.summary.metadata.level at NONE.");
    }
    checkColumns(configuration, context);
    FileEncryptionProperties properties = super.getFileEncryptionProperties(configuration, path, context);
    if (properties == null) {
      throw new ParquetCryptoRuntimeException(path.getName() + " would be written in plaintext.");
    }
    return properties;
  }

  public FileDecryptionProperties getFileDecryptionProperties(Configuration configuration, Path path) {
    // As a setting of the session, and as an option of the read, whose names Spark changes to lower case.
    if (configuration.getBoolean("spark.sql.files.ignoreCorruptFiles", false)
        || configuration.getBoolean("ignoreCorruptFiles", false)
        || configuration.getBoolean("ignorecorruptfiles", false)) {
      // An Error: what is less, Spark takes for a corrupt file.
      throw new Error(
          "ignoreCorruptFiles would leave out, in silence, files that somebody changed or whose keys are refused. "
              + "Leave spark.sql.files.ignoreCorruptFiles at false.");
    }
    FileTail tail = FileTail.read(configuration, path);
    if ("reject".equals(configuration.get(CTR_FILES, "allow"))) {
      rejectCtr(path, tail);
    }
    CheckedFile file = new CheckedFile(configuration, path, tail);
    FileDecryptionProperties.Builder builder = FileDecryptionProperties.builder().withKeyRetriever(file);
    if (isAllowed(configuration, PLAINTEXT_READS)) {
      builder = builder.withPlaintextFilesAllowed();
    }
    if (file.aadPrefix() != null) {
      builder = builder.withAADPrefix(file.aadPrefix());
    }
    return builder.build();
  }

  /**
   * Refuses a file that says that its pages are not authenticated: parquet-java asks nobody before it believes that.
   * Beside an encrypted footer no key protects what it says.
   */
  private static void rejectCtr(Path path, FileTail tail) {
    if (tail.isCtr()) {
      throw new ParquetCryptoRuntimeException(
          path.getName() + " says AES_GCM_CTR_V1: its page data would not be authenticated, and the configuration has"
              + " ctr_files: reject.");
    }
  }

  /** Checks that a file has the columns which its options were made for: no others, and none fewer. */
  private static void checkColumns(Configuration configuration, WriteSupport.WriteContext context) {
    String expected = configuration.get(COLUMNS);
    String identity = configuration.get(OPTIONS_IDENTITY);
    if (expected == null || identity == null) {
      throw new ParquetCryptoRuntimeException(
          "The encryption options of this write were not made by parquet-keytools. " + HINT + ".");
    }
    if (configuration.get(SESSION_IDENTITY) == null) {
      throw new ParquetCryptoRuntimeException(
          "This session has no configuration of parquet-keytools. Make it with parquet_keytools.spark.configure, or"
              + " give it one with configure_session.");
    }
    if (!identity.equals(configuration.get(SESSION_IDENTITY))) {
      throw new ParquetCryptoRuntimeException(
          "The options of this write were made by another configuration than the one that the session has.");
    }
    TreeSet missing = new TreeSet();
    for (String column : expected.split(",")) {
      missing.add(java.net.URLDecoder.decode(column, StandardCharsets.UTF_8));
    }
    TreeSet unknown = new TreeSet();
    for (Object column : context.getSchema().getColumns()) {
      String name = String.join(".", ((ColumnDescriptor) column).getPath());
      if (!missing.remove(name)) {
        unknown.add(name);
      }
    }
    if (!unknown.isEmpty() || !missing.isEmpty()) {
      throw new ParquetCryptoRuntimeException(
          "The columns are not those that the options of table " + configuration.get(TABLE) + " were made for"
              + (unknown.isEmpty() ? "" : ": new are " + unknown) + (missing.isEmpty() ? "" : ": missing are " + missing)
              + ". " + HINT + " of the frame that is written, with partition_by where it is partitioned.");
    }
  }

  private static boolean isSet(Configuration configuration, String name) {
    return !configuration.getTrimmed(name, "").isEmpty();
  }

  private static boolean isAllowed(Configuration configuration, String name) {
    return "allow".equals(configuration.get(name, "reject"));
  }
}
