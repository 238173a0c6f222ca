package parquet_keytools;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.LinkedHashSet;
import java.util.List;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.crypto.DecryptionKeyRetriever;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.format.ColumnChunk;
import org.apache.parquet.format.ColumnCryptoMetaData;
import org.apache.parquet.format.FileMetaData;
import org.apache.parquet.format.RowGroup;
import org.apache.spark.sql.catalyst.catalog.ExternalCatalogUtils;

/**
 * A file that is what its table says, and its keys for parquet-java.
 *
 * The worker compares: the footer's key and the AAD prefix before a key is unwrapped, then the columns that the
 * authentic footer has. What it said of the columns of one file goes for others that say the same. parquet-java reads
 * the footer again afterwards: it gets the footer's DEK only for the key metadata that were checked, and no other footer
 * is authentic under that DEK.
 */
final class CheckedFile implements DecryptionKeyRetriever {
  static final String TABLE = "parquet.keytools.table";
  private static final String AAD_PREFIX = "parquet.keytools.aad.prefix";

  private static final ObjectMapper JSON = new ObjectMapper();
  private static final int MOST_COLUMNS = 1000;
  private static final int LOOKS = 8;

  private final Configuration configuration;
  private final Path path;
  private FileKeys keys;
  private FileTail tail;
  private byte[] aadPrefix;
  private boolean isOpened = false;

  /**
   * Checks a file.
   *
   * @param tail its footer as it was read
   */
  CheckedFile(Configuration configuration, Path path, FileTail tail) {
    this.configuration = configuration;
    this.path = path;
    take(tail);
  }

  /** Returns the AAD prefix that the file must have for parquet-java; null where it stores its own, or has none. */
  byte[] aadPrefix() {
    return aadPrefix;
  }

  public synchronized byte[] getKey(byte[] keyMetadata) {
    if (!isOpened) {
      // The footer's key is the first that parquet-java asks for.
      for (int looks = 1; !Arrays.equals(keyMetadata, tail.footerKeyMetadata); looks++) {
        byte[] prefix = aadPrefix;
        take(FileTail.read(configuration, path));
        if (looks == LOOKS || !Arrays.equals(prefix, aadPrefix)) {
          throw new ParquetCryptoRuntimeException(
              path.getName() + " was replaced while it was opened. A retry of the task reads what is there now.");
        }
      }
      isOpened = true;
    }
    return keys.dek(keyMetadata);
  }

  private void take(FileTail found) {
    tail = found;
    // Key material beside the file may have been replaced with it.
    keys = new FileKeys(configuration, path);
    aadPrefix = null;
    if (tail.isPlaintextFile()) {
      return; // parquet-java says what happens to it.
    }
    KmsWorker worker = KmsWorker.of(configuration);
    ObjectNode request = JSON.createObjectNode();
    request.put("table", configuration.get(TABLE, ""));
    request.put("algorithm", tail.algorithmName());
    request.put("footer_key", keys.masterKeyId(tail.footerKeyMetadata));
    worker.addFolders(request, path);
    FileMetaData footer = authenticFooter(worker.checkFooter(request, aad(), path.toString()));
    request.set("folders", foldersWithValues());
    List parts = columns(footer);
    if (worker.keysDependOnFiles()) {
      // All keys of a file have the same value.
      request.set("keys", keysOf(parts));
    }
    for (Object columns : parts) {
      request.set("columns", (ArrayNode) columns);
      worker.check(request, path.toString());
    }
    worker.checkValues(request, footer, path.toString());
  }

  /** Returns what the file says of its AAD, and the prefix that the read gives, if any. */
  private ObjectNode aad() {
    ObjectNode aad = JSON.createObjectNode();
    aad.put("file_name", path.getName());
    aad.put("given", configuration.get(AAD_PREFIX));
    aad.put("stored", tail.storedAadPrefix());
    aad.put("file_unique", tail.aadFileUnique());
    aad.put("supply", tail.mustSupplyAadPrefix());
    return aad;
  }

  /** Returns the names of columns to which folders give values: Spark takes these in place of a file's own. */
  private ArrayNode foldersWithValues() {
    ArrayNode names = JSON.createArrayNode();
    for (Path folder = path.getParent(); folder != null; folder = folder.getParent()) {
      int end = folder.getName().indexOf('=');
      if (end > 0) {
        names.add(ExternalCatalogUtils.unescapePathName(folder.getName().substring(0, end)));
      }
    }
    return names;
  }

  /** Returns the footer; the answer of the worker has the AAD prefixes of the file, or that any will do. */
  private FileMetaData authenticFooter(JsonNode answer) {
    boolean isExpected = ((JsonNode) answer.path("is_expected")).asBoolean();
    byte[] dek = keys.dek(tail.footerKeyMetadata);
    for (Object each : (JsonNode) answer.path("prefixes")) {
      byte[] prefix = Base64.getDecoder().decode(((JsonNode) each).asText());
      FileMetaData footer = tail.open(dek, prefix);
      if (footer != null) {
        aadPrefix = isExpected ? prefix : null;
        return footer;
      }
    }
    throw new ParquetCryptoRuntimeException(
        "The footer of " + path + " is not authentic"
            + (isExpected ? " with the AAD prefix that is expected: somebody changed it, or it is another file."
                : ": somebody changed it."));
  }

  /** Returns what the footer says of leaf columns, each thing once, in parts that fit into a request. */
  private List columns(FileMetaData footer) {
    LinkedHashSet seen = new LinkedHashSet();
    List parts = new ArrayList();
    ArrayNode part = null;
    for (Object group : footer.getRow_groups()) {
      for (Object each : ((RowGroup) group).getColumns()) {
        ColumnChunk chunk = (ColumnChunk) each;
        ColumnCryptoMetaData crypto = chunk.getCrypto_metadata();
        ArrayNode column = JSON.createArrayNode();
        List names;
        if (crypto == null) {
          names = pathOf(chunk);
        } else if (crypto.isSetENCRYPTION_WITH_FOOTER_KEY()) {
          names = pathOf(chunk);
        } else {
          names = crypto.getENCRYPTION_WITH_COLUMN_KEY().getPath_in_schema();
        }
        ArrayNode path = column.addArray();
        for (Object name : names) {
          path.add((String) name);
        }
        if (crypto == null) {
          column.add("PLAINTEXT").addNull();
        } else if (crypto.isSetENCRYPTION_WITH_FOOTER_KEY()) {
          column.add("FOOTER_KEY").addNull();
        } else {
          byte[] keyMetadata = crypto.getENCRYPTION_WITH_COLUMN_KEY().getKey_metadata();
          column.add("COLUMN_KEY").add(keys.masterKeyId(keyMetadata == null ? new byte[0] : keyMetadata));
        }
        if (seen.add(column.toString())) {
          if (part == null || part.size() >= MOST_COLUMNS) {
            part = JSON.createArrayNode();
            parts.add(part);
          }
          part.add(column);
        }
      }
    }
    return parts;
  }

  /** Returns the master keys of columns, each once. */
  private static ArrayNode keysOf(List parts) {
    LinkedHashSet names = new LinkedHashSet();
    for (Object part : parts) {
      for (Object column : (ArrayNode) part) {
        JsonNode name = (JsonNode) ((JsonNode) column).get(2);
        if (name.isTextual()) {
          names.add(name.asText());
        }
      }
    }
    ArrayNode keys = JSON.createArrayNode();
    for (Object name : names) {
      keys.add((String) name);
    }
    return keys;
  }

  private List pathOf(ColumnChunk chunk) {
    if (chunk.getMeta_data() == null) {
      throw new ParquetCryptoRuntimeException("A column of " + path + " has no metadata.");
    }
    return chunk.getMeta_data().getPath_in_schema();
  }
}
