import com.esotericsoftware.kryo.Kryo;
import com.esotericsoftware.kryo.io.Input;
import com.esotericsoftware.kryo.io.Output;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.reflect.InvocationTargetException;
import java.net.URI;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import javax.crypto.Cipher;
import javax.crypto.spec.GCMParameterSpec;
import javax.crypto.spec.SecretKeySpec;
import org.apache.avro.Schema;
import org.apache.avro.file.DataFileReader;
import org.apache.avro.file.SeekableByteArrayInput;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.DecoderFactory;
import org.apache.hadoop.fs.Path;
import org.apache.iceberg.encryption.KeyManagementClient;
import org.apache.parquet.crypto.FileDecryptionProperties;
import org.apache.parquet.example.data.Group;
import org.apache.parquet.hadoop.ParquetReader;
import org.apache.parquet.hadoop.example.GroupReadSupport;

/**
 * Calls our KMS client as Iceberg's Java library does, and reads encrypted tables step by step, with Avro, parquet-java
 * and the JDK alone. Takes one job a line, in JSON. Raw types, for Janino does not know all of generics.
 */
public class IcebergProgram {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final int BLOCK = 1 << 20;
  private static final String KEY_METADATA =
      "{\"type\":\"record\",\"name\":\"m\",\"fields\":[{\"name\":\"encryption_key\",\"type\":\"bytes\"},"
          + "{\"name\":\"aad_prefix\",\"type\":[\"null\",\"bytes\"]},{\"name\":\"file_length\",\"type\":[\"null\",\"long\"]}]}";

  private static KeyManagementClient client;

  public static void main(String[] arguments) throws Exception {
    BufferedReader jobs = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    String line;
    while ((line = jobs.readLine()) != null) {
      ObjectNode answer = JSON.createObjectNode();
      try {
        JsonNode job = JSON.readTree(line);
        answer.set("result", job.get("do").asText().equals("rows") ? rows(job) : answer(job));
      } catch (Throwable error) {
        Throwable cause = error instanceof InvocationTargetException ? error.getCause() : error;
        StringWriter trace = new StringWriter();
        cause.printStackTrace(new PrintWriter(trace));
        answer.put("error", cause.getClass().getName() + ": " + cause.getMessage());
        answer.put("trace", trace.toString());
      }
      System.out.println("RESULT " + answer);
      System.out.flush();
    }
  }

  private static JsonNode answer(JsonNode job) throws Exception {
    String what = job.get("do").asText();
    if (what.equals("initialize")) {
      client = initialized((Map) JSON.convertValue(job.get("properties"), HashMap.class));
      return JSON.getNodeFactory().textNode(client.toString());
    }
    if (what.equals("send")) {
      ByteArrayOutputStream sent = new ByteArrayOutputStream();
      if (job.get("with").asText().equals("kryo")) {
        // As Spark does, where spark.serializer says so.
        Output output = new Output(sent);
        new Kryo().writeClassAndObject(output, client);
        output.flush();
        client = (KeyManagementClient) new Kryo().readClassAndObject(new Input(sent.toByteArray()));
        return JSON.getNodeFactory().binaryNode(sent.toByteArray());
      }
      new ObjectOutputStream(sent).writeObject(client);
      client = (KeyManagementClient) new ObjectInputStream(new ByteArrayInputStream(sent.toByteArray())).readObject();
      return JSON.getNodeFactory().binaryNode(sent.toByteArray());
    }
    if (what.equals("rows by Iceberg")) {
      Class library = Class.forName("org.apache.iceberg.IcebergLibrary");
      Object rows =
          library
              .getMethod("rows", new Class[] {String.class, KeyManagementClient.class})
              .invoke(null, new Object[] {job.get("metadata").asText(), client});
      return JSON.valueToTree(rows);
    }
    byte[] key = job.get("key").binaryValue();
    // A part of a larger buffer, which nobody may write to.
    ByteBuffer whole = ByteBuffer.allocate(key.length + 7);
    whole.position(3);
    whole.put(key);
    whole.position(3);
    whole.limit(3 + key.length);
    ByteBuffer given = (ByteBuffer) whole.asReadOnlyBuffer();
    String by = job.get("by").isNull() ? null : job.get("by").asText();
    ByteBuffer found = what.equals("wrap") ? client.wrapKey(given, by) : client.unwrapKey(given, by);
    if (given.position() != 3 || given.remaining() != key.length) {
      throw new IllegalStateException("the buffer of the caller was moved");
    }
    return JSON.getNodeFactory().binaryNode(bytes(found));
  }

  /** Makes the client as the catalogs of Iceberg do; by hand where there is no Iceberg. */
  private static KeyManagementClient initialized(Map properties) throws Exception {
    try {
      Class util = Class.forName("org.apache.iceberg.encryption.EncryptionUtil");
      return (KeyManagementClient)
          util.getMethod("createKmsClient", new Class[] {Map.class}).invoke(null, new Object[] {properties});
    } catch (ClassNotFoundException none) {
      Class found = Class.forName((String) properties.get("encryption.kms-impl"));
      KeyManagementClient made =
          (KeyManagementClient) found.getConstructor(new Class[0]).newInstance(new Object[0]);
      made.initialize(properties);
      return made;
    }
  }

  // --- a table ---

  /** Returns the rows of the current snapshot, as parquet-java reads its data files. */
  private static JsonNode rows(JsonNode job) throws Exception {
    JsonNode metadata = JSON.readTree(read(job.get("metadata").asText()));
    String masterKey = metadata.get("properties").get("encryption.key-id").asText();
    Map keys = new HashMap();
    for (Iterator all = metadata.get("encryption-keys").elements(); all.hasNext(); ) {
      JsonNode entry = (JsonNode) all.next();
      keys.put(entry.get("key-id").asText(), entry);
    }
    JsonNode current = null;
    for (Iterator all = metadata.get("snapshots").elements(); all.hasNext(); ) {
      JsonNode snapshot = (JsonNode) all.next();
      if (snapshot.get("snapshot-id").asLong() == metadata.get("current-snapshot-id").asLong()) {
        current = snapshot;
      }
    }
    JsonNode listEntry = (JsonNode) keys.get(current.get("key-id").asText());
    JsonNode kekEntry = (JsonNode) keys.get(listEntry.get("encrypted-by-id").asText());
    ByteBuffer wrapped = ByteBuffer.wrap(kekEntry.get("encrypted-key-metadata").binaryValue());
    byte[] kek = bytes(client.unwrapKey(wrapped, masterKey));
    byte[] timestamp = kekEntry.get("properties").get("KEY_TIMESTAMP").asText().getBytes(StandardCharsets.UTF_8);
    byte[] listKey = open(kek, listEntry.get("encrypted-key-metadata").binaryValue(), timestamp);
    ArrayNode rows = JSON.createArrayNode();
    for (Object manifest : avro(plaintext(listKey, current.get("manifest-list").asText()))) {
      GenericRecord listed = (GenericRecord) manifest;
      byte[] manifestKey = bytes((ByteBuffer) listed.get("key_metadata"));
      for (Object each : avro(plaintext(manifestKey, listed.get("manifest_path").toString()))) {
        GenericRecord entry = (GenericRecord) each;
        if (((Integer) entry.get("status")).intValue() != 2) {
          addRows(rows, (GenericRecord) entry.get("data_file"), job.get("prefix").asText());
        }
      }
    }
    return rows;
  }

  private static void addRows(ArrayNode rows, GenericRecord file, String prefix) throws Exception {
    GenericRecord metadata = keyMetadata(bytes((ByteBuffer) file.get("key_metadata")));
    FileDecryptionProperties.Builder builder =
        FileDecryptionProperties.builder().withFooterKey(bytes((ByteBuffer) metadata.get("encryption_key")));
    byte[] aadPrefix = bytes((ByteBuffer) metadata.get("aad_prefix"));
    if (prefix.equals("another")) {
      aadPrefix[0] ^= 1;
    }
    if (!prefix.equals("none")) {
      builder = builder.withAADPrefix(aadPrefix);
    }
    ParquetReader reader =
        ParquetReader.builder(new GroupReadSupport(), new Path(file.get("file_path").toString()))
            .withDecryption(builder.build())
            .build();
    for (Group row = (Group) reader.read(); row != null; row = (Group) reader.read()) {
      rows.addArray().add(row.getLong("id", 0)).add(row.getString("name", 0));
    }
    reader.close();
  }

  private static List avro(byte[] data) throws Exception {
    List records = new ArrayList();
    DataFileReader reader = new DataFileReader(new SeekableByteArrayInput(data), new GenericDatumReader());
    while (reader.hasNext()) {
      records.add(reader.next());
    }
    return records;
  }

  private static GenericRecord keyMetadata(byte[] data) throws Exception {
    if (data[0] != 1) {
      throw new IOException("key metadata of another version");
    }
    GenericDatumReader reader = new GenericDatumReader(new Schema.Parser().parse(KEY_METADATA));
    return (GenericRecord) reader.read(null, DecoderFactory.get().binaryDecoder(data, 1, data.length - 1, null));
  }

  /** Returns the plaintext of an AGS1 stream. */
  private static byte[] plaintext(byte[] encodedKey, String location) throws Exception {
    GenericRecord metadata = keyMetadata(encodedKey);
    byte[] data = read(location);
    byte[] prefix = bytes((ByteBuffer) metadata.get("aad_prefix"));
    if (data.length != ((Long) metadata.get("file_length")).longValue()) {
      throw new IOException(location + " has another length");
    }
    ByteArrayOutputStream all = new ByteArrayOutputStream();
    for (int start = 8, block = 0; start < data.length; start += BLOCK + 28, block++) {
      ByteBuffer aad = ByteBuffer.allocate(prefix.length + 4);
      aad.order(ByteOrder.LITTLE_ENDIAN);
      aad.put(prefix);
      aad.putInt(block);
      byte[] sealed = Arrays.copyOfRange(data, start, Math.min(data.length, start + BLOCK + 28));
      all.write(open(bytes((ByteBuffer) metadata.get("encryption_key")), sealed, aad.array()));
    }
    return all.toByteArray();
  }

  private static byte[] open(byte[] key, byte[] sealed, byte[] aad) throws Exception {
    Cipher cipher = Cipher.getInstance("AES/GCM/NoPadding");
    cipher.init(Cipher.DECRYPT_MODE, new SecretKeySpec(key, "AES"), new GCMParameterSpec(128, sealed, 0, 12));
    cipher.updateAAD(aad);
    return cipher.doFinal(sealed, 12, sealed.length - 12);
  }

  private static byte[] bytes(ByteBuffer buffer) {
    byte[] found = new byte[buffer.remaining()];
    ((ByteBuffer) buffer.duplicate()).get(found);
    return found;
  }

  private static byte[] read(String location) throws IOException {
    return Files.readAllBytes(Paths.get(URI.create(location)));
  }
}
