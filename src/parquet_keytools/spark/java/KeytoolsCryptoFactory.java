package parquet_keytools;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.Iterator;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.column.ColumnDescriptor;
import org.apache.parquet.column.ParquetProperties.WriterVersion;
import org.apache.parquet.crypto.EncryptionPropertiesFactory;
import org.apache.parquet.crypto.FileDecryptionProperties;
import org.apache.parquet.crypto.FileEncryptionProperties;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.crypto.keytools.KeyToolkit;
import org.apache.parquet.crypto.keytools.PropertiesDrivenCryptoFactory;
import org.apache.parquet.hadoop.ParquetOutputFormat;
import org.apache.parquet.hadoop.api.WriteSupport;

/**
 * parquet-java's own factory, less what it lets through in silence: files without encryption, columns that nobody
 * thought of, levels of V2 pages in plaintext, and plaintext files in place of encrypted ones.
 */
public class KeytoolsCryptoFactory extends PropertiesDrivenCryptoFactory {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final String PLAINTEXT_WRITES = "parquet.keytools.plaintext.writes";
  private static final String PLAINTEXT_READS = "parquet.keytools.plaintext.reads";
  private static final String COLUMNS = "parquet.keytools.columns";
  private static final String KEY_VALUES = "parquet.keytools.key.values";
  private static final String TABLE = CheckedFile.TABLE;
  private static final String SCHEMA = "org.apache.spark.sql.parquet.row.metadata";
  private static final String CTR_FILES = "parquet.keytools.ctr.files";
  private static final String ENCRYPTION = "parquet.encryption.";
  private static final String HINT = "Give the write .options(**keytools.spark_options(table, df.schema))";

  public FileEncryptionProperties getFileEncryptionProperties(
      Configuration configuration, Path path, WriteSupport.WriteContext context) {
    Configuration ours = checkWrite(configuration, path.getName(), path, context, JSON.createObjectNode());
    if (ours == null) {
      return null;
    }
    // A catalog may have stored the options when the session had another configuration.
    ours.set(KeyToolkit.KEY_ACCESS_TOKEN_PROPERTY_NAME, cacheName(configuration));
    FileEncryptionProperties properties = super.getFileEncryptionProperties(ours, path, context);
    if (properties == null) {
      throw new ParquetCryptoRuntimeException(path.getName() + " would be written in plaintext.");
    }
    return properties;
  }

  /**
   * Fails where files would not be encrypted as their table says.
   *
   * @param place what is written, for messages
   * @param file a file that is written, on the driver any name in the folder of all; null where that is not known
   * @param request what the worker is asked, besides what is the same for each file
   * @return what parquet-java encrypts with: the keys of all columns, of those too that are new since the options were
   *     made; null where plaintext is meant
   */
  static Configuration checkWrite(
      Configuration configuration, String place, Path file, WriteSupport.WriteContext context, ObjectNode request) {
    if (keyOption(configuration) == null) {
      if (isPlaintextAllowed(configuration)) {
        return null;
      }
      throw new ParquetCryptoRuntimeException(
          place + " would be written in plaintext. " + HINT + ", or " + PLAINTEXT_WRITES
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
    String expected = configuration.get(COLUMNS);
    if (expected == null || configuration.get(TABLE) == null) {
      throw new ParquetCryptoRuntimeException(
          "The encryption options of this write were not made by parquet-keytools. " + HINT + ".");
    }
    if (configuration.get(KmsWorker.CONFIGURATION) == null) {
      throw new ParquetCryptoRuntimeException(
          "This session has no configuration of parquet-keytools. Make it with parquet_keytools.spark.configure, or"
              + " give it one with configure_session.");
    }
    request.put("table", configuration.get(TABLE));
    request.put("expected", expected);
    request.put("key_values", configuration.get(KEY_VALUES, ""));
    if (file != null) {
      KmsWorker.of(configuration).addFolders(request, file);
    }
    ArrayNode columns = request.putArray("columns");
    for (Object column : context.getSchema().getColumns()) {
      ArrayNode path = columns.addArray();
      for (String name : ((ColumnDescriptor) column).getPath()) {
        path.add(name);
      }
    }
    // Its fields carry the labels of columns.
    Object schema = context.getExtraMetaData().get(SCHEMA);
    request.put("schema", schema == null ? "{}" : (String) schema);
    ObjectNode options = request.putObject("options");
    for (Object option : configuration.getPropsWithPrefix(ENCRYPTION).entrySet()) {
      Map.Entry entry = (Map.Entry) option;
      options.put(ENCRYPTION + entry.getKey(), (String) entry.getValue());
    }
    Configuration ours = new Configuration(configuration);
    try {
      JsonNode keys = JSON.readTree(KmsWorker.of(configuration).checkWrite(request));
      for (Iterator names = keys.fieldNames(); names.hasNext(); ) {
        String name = (String) names.next();
        ours.set(name, keys.get(name).asText());
      }
    } catch (IOException error) {
      throw new ParquetCryptoRuntimeException("The answer of the KMS worker is not valid.");
    }
    return ours;
  }

  /** Returns the option that names a key for what is written; null where none does. */
  static String keyOption(Configuration configuration) {
    String[] names = {FOOTER_KEY_PROPERTY_NAME, COLUMN_KEYS_PROPERTY_NAME, UNIFORM_KEY_PROPERTY_NAME};
    for (String name : names) {
      if (!configuration.getTrimmed(name, "").isEmpty()) {
        return name;
      }
    }
    return null;
  }

  /** Returns whether parquet-java asks this factory. */
  static boolean isOurs(Configuration configuration) {
    return KeytoolsCryptoFactory.class.getName().equals(
        configuration.getTrimmed(EncryptionPropertiesFactory.CRYPTO_FACTORY_CLASS_PROPERTY_NAME));
  }

  static boolean isPlaintextAllowed(Configuration configuration) {
    return isAllowed(configuration, PLAINTEXT_WRITES);
  }

  /** Returns what parquet-java keeps KEKs and KMS clients by: no two that differ may have the same. */
  private static String cacheName(Configuration configuration) {
    String text = KmsWorker.of(configuration).identity() + '\n'
        + configuration.get(KeyToolkit.KEY_ACCESS_TOKEN_PROPERTY_NAME, "");
    return FileTail.digest(text.getBytes(StandardCharsets.UTF_8));
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

  private static boolean isAllowed(Configuration configuration, String name) {
    return "allow".equals(configuration.get(name, "reject"));
  }
}
