package org.apache.iceberg;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.function.Function;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.data.Record;
import org.apache.iceberg.data.parquet.GenericParquetReaders;
import org.apache.iceberg.encryption.Ciphers;
import org.apache.iceberg.encryption.EncryptedFiles;
import org.apache.iceberg.encryption.EncryptedKey;
import org.apache.iceberg.encryption.EncryptingFileIO;
import org.apache.iceberg.encryption.EncryptionManager;
import org.apache.iceberg.encryption.EncryptionUtil;
import org.apache.iceberg.encryption.KeyManagementClient;
import org.apache.iceberg.hadoop.HadoopFileIO;
import org.apache.iceberg.io.InputFile;
import org.apache.iceberg.parquet.Parquet;
import org.apache.iceberg.shaded.org.apache.parquet.schema.MessageType;
import org.apache.iceberg.util.ByteBuffers;

/**
 * Reads a table with the classes of Iceberg's Java library, 1.10. This version has all of them but the step from a
 * snapshot to the key of its manifest list, which 1.11 has and which is done here.
 */
public class IcebergLibrary {
  /** Returns the rows of the current snapshot, as lists of all columns. */
  public static List rows(String location, KeyManagementClient client) throws Exception {
    TableMetadata metadata = TableMetadataParser.read(Files.localInput(location));
    Map keys = new HashMap();
    for (Object each : metadata.encryptionKeys()) {
      keys.put(((EncryptedKey) each).keyId(), each);
    }
    Snapshot current = metadata.currentSnapshot();
    EncryptedKey listKey = (EncryptedKey) keys.get(current.keyId());
    EncryptedKey kek = (EncryptedKey) keys.get(listKey.encryptedById());
    String masterKey = (String) metadata.properties().get("encryption.key-id");
    ByteBuffer opened = client.unwrapKey(kek.encryptedKeyMetadata(), masterKey);
    String timestamp = (String) kek.properties().get("KEY_TIMESTAMP");
    byte[] keyMetadata =
        new Ciphers.AesGcmDecryptor(ByteBuffers.toByteArray(opened))
            .decrypt(
                ByteBuffers.toByteArray(listKey.encryptedKeyMetadata()), timestamp.getBytes(StandardCharsets.UTF_8));
    EncryptionManager manager = sent(EncryptionUtil.createEncryptionManager(metadata.properties(), client));
    InputFile list =
        manager.decrypt(EncryptedFiles.encryptedInput(Files.localInput(current.manifestListLocation()), keyMetadata));
    EncryptingFileIO io = EncryptingFileIO.combine(new HadoopFileIO(new Configuration()), manager);
    List rows = new ArrayList();
    for (Object manifest : ManifestLists.read(list)) {
      Iterator files = ManifestFiles.read((ManifestFile) manifest, io, metadata.specsById()).iterator();
      while (files.hasNext()) {
        addRows(rows, io.newInputFile((DataFile) files.next()), metadata.schema());
      }
    }
    return rows;
  }

  private static void addRows(List rows, InputFile file, final Schema schema) {
    Function reader = new Function() {
      public Object apply(Object type) {
        return GenericParquetReaders.buildReader(schema, (MessageType) type);
      }
    };
    Iterator records = Parquet.read(file).project(schema).createReaderFunc(reader).build().iterator();
    while (records.hasNext()) {
      Record record = (Record) records.next();
      List row = new ArrayList();
      for (int column = 0; column < record.size(); column++) {
        row.add(record.get(column));
      }
      rows.add(row);
    }
  }

  /** Returns the manager as an executor of Spark gets it, with its KMS client. */
  private static EncryptionManager sent(EncryptionManager manager) throws Exception {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    new ObjectOutputStream(bytes).writeObject(manager);
    return (EncryptionManager) new ObjectInputStream(new ByteArrayInputStream(bytes.toByteArray())).readObject();
  }
}
