package parquet_keytools;

import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.util.Locale;
import java.util.NoSuchElementException;
import java.util.TreeSet;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.mapreduce.Job;
import org.apache.parquet.crypto.EncryptionPropertiesFactory;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.hadoop.api.WriteSupport;
import org.apache.spark.sql.SaveMode;
import org.apache.spark.sql.catalyst.catalog.CatalogStorageFormat;
import org.apache.spark.sql.catalyst.catalog.CatalogTable;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.V2CreateTableAsSelectPlan;
import org.apache.spark.sql.catalyst.plans.logical.V2WriteCommand;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.command.DataWritingCommand;
import org.apache.spark.sql.execution.command.ExplainCommand;
import org.apache.spark.sql.execution.datasources.DataSource;
import org.apache.spark.sql.execution.datasources.FileFormat;
import org.apache.spark.sql.execution.datasources.InsertIntoHadoopFsRelationCommand;
import org.apache.spark.sql.execution.datasources.SaveIntoDataSourceCommand;
import org.apache.spark.sql.execution.datasources.V1WriteCommand;
import org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat;
import org.apache.spark.sql.execution.datasources.parquet.ParquetWriteSupport;
import org.apache.spark.sql.execution.datasources.v2.FileDataSourceV2;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import scala.Option;
import scala.Product;
import scala.Tuple2;
import scala.collection.Iterator;
import scala.collection.immutable.Map;
import scala.collection.immutable.Nil$;
import scala.collection.immutable.Seq;

/**
 * Refuses writes on the driver, while Spark plans them: it empties the target, or drops the table, before the first
 * task starts, and only a task would find out that the write is refused.
 *
 * It plans nothing itself. Spark asks each strategy for a plan of each node, and goes on to the next one.
 */
final class WriteCheck extends SparkStrategy {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final String EXECUTION = "spark.sql.execution.id";
  private static final String EXPLAINED = "parquet.keytools.explained.execution";
  private static final String PROVEN = "parquet.keytools.proven.write";
  private static final String FACTORY = EncryptionPropertiesFactory.CRYPTO_FACTORY_CLASS_PROPERTY_NAME;

  private static final String CONVERT = "spark.sql.hive.convert";
  private static final String INFERS_SHREDDING = "spark.sql.variant.inferShreddingSchema";

  private final SparkSession session;

  WriteCheck(SparkSession session) {
    this.session = session;
  }

  public Seq apply(LogicalPlan plan) {
    if (plan instanceof ExplainCommand) {
      // It plans a command without running it, in the execution that it has itself.
      session.sparkContext().setLocalProperty(EXPLAINED, execution());
    } else if (isWrite(plan) && !isExplained()) {
      try {
        check(plan);
      } catch (ParquetCryptoRuntimeException refused) {
        throw new RefusedWriteException(refused.getMessage());
      }
    }
    return Nil$.MODULE$;
  }

  private String execution() {
    return session.sparkContext().getLocalProperty(EXECUTION);
  }

  private boolean isExplained() {
    String execution = execution();
    return execution != null && execution.equals(session.sparkContext().getLocalProperty(EXPLAINED));
  }

  private static boolean isWrite(LogicalPlan plan) {
    return plan instanceof DataWritingCommand || plan instanceof SaveIntoDataSourceCommand
        || plan instanceof V2WriteCommand || plan instanceof V2CreateTableAsSelectPlan || isSaveAsTable(plan);
  }

  /** Earlier versions of Spark 4 have no such class: there, saveAsTable drops a table without a plan. */
  private static boolean isSaveAsTable(LogicalPlan plan) {
    return "SaveAsV1TableCommand".equals(plan.getClass().getSimpleName());
  }

  private void check(LogicalPlan plan) {
    if (isSaveAsTable(plan)) {
      checkSaveAsTable((Product) plan);
    } else if (plan instanceof V1WriteCommand) {
      checkFiles((V1WriteCommand) plan);
    } else {
      checkOthers(plan);
    }
  }

  private void checkFiles(V1WriteCommand write) {
    CatalogTable table = tableOf((Product) write);
    String place = table == null ? write.fileFormat().toString() : table.identifier().table();
    Path file = null;
    if (write instanceof InsertIntoHadoopFsRelationCommand) {
      InsertIntoHadoopFsRelationCommand files = (InsertIntoHadoopFsRelationCommand) write;
      SaveMode mode = files.mode();
      place = files.outputPath().toString();
      file = new Path(files.outputPath(), "new");
      if ((mode == SaveMode.Ignore || mode == SaveMode.ErrorIfExists) && exists(files.outputPath())) {
        return; // Spark writes nothing.
      }
    }
    StructType schema = new StructType();
    TreeSet partitions = new TreeSet();
    for (Iterator columns = write.outputColumns().iterator(); columns.hasNext(); ) {
      Attribute column = (Attribute) columns.next();
      if (isAmong(column, write.partitionColumns())) {
        partitions.add(column.name());
      } else {
        schema = schema.add(column.name(), column.dataType(), column.nullable(), column.metadata());
      }
    }
    checkFormat(write.fileFormat(), place, file, write.options(), table, schema, partitions);
  }

  /**
   * A table that is there may be dropped before the write is planned in which it is made again: tables of Hive are, and
   * in earlier versions of Spark all tables.
   */
  private void checkSaveAsTable(Product save) {
    CatalogTable table = (CatalogTable) save.productElement(0);
    if (save.productElement(1) != SaveMode.Overwrite
        || !session.sessionState().catalog().tableExists(table.identifier())) {
      return;
    }
    StructType schema = new StructType();
    TreeSet partitions = new TreeSet();
    for (StructField field : ((LogicalPlan) save.productElement(2)).schema().fields()) {
      if (isNamed(field.name(), table.partitionColumnNames())) {
        partitions.add(field.name());
      } else {
        schema = schema.add(field);
      }
    }
    String provider = (String) table.provider().get();
    Map options = table.storage().properties();
    if ("hive".equalsIgnoreCase(provider) && isHiveParquet(options)) {
      if (!"true".equals(setting(CONVERT + "MetastoreParquet")) || !"true".equals(setting(CONVERT + "MetastoreCtas"))) {
        refuseHive(options);
      }
      provider = "parquet";
    }
    Object source = instance(DataSource.lookupDataSource(provider, session.sessionState().conf()));
    if (source instanceof FileDataSourceV2) {
      source = instance(((FileDataSourceV2) source).fallbackFileFormat());
    }
    if (source instanceof FileFormat) {
      FileFormat format = (FileFormat) source;
      checkFormat(format, table.identifier().table(), null, options, null, schema, partitions);
    } else {
      refuseOthers(provider, options, table);
    }
  }

  private static Object instance(Class source) {
    try {
      return source.getDeclaredConstructor(new Class[0]).newInstance(new Object[0]);
    } catch (ReflectiveOperationException error) {
      return null; // Spark fails in the same way.
    }
  }

  private void checkFormat(
      FileFormat format, String place, Path file, Map options, CatalogTable table, StructType schema,
      TreeSet partitions) {
    if (!(format instanceof ParquetFileFormat)) {
      if (table != null && isHiveParquet(table.storage())) {
        refuseHive(options);
      }
      refuseOthers(format.toString(), options, table);
      return;
    }
    Configuration configuration = session.sessionState().newHadoopConfWithOptions(options);
    if (configuration.getTrimmed(FACTORY, "").isEmpty()) {
      refuseOthers("Parquet without " + FACTORY, options, table);
      return;
    }
    if (!KeytoolsCryptoFactory.isOurs(configuration)) {
      return; // parquet-java asks another factory.
    }
    if (KeytoolsCryptoFactory.keyOption(configuration) != null) {
      refuseShredding(schema, options);
    }
    ObjectNode request = JSON.createObjectNode();
    ArrayNode names = request.putArray("partitions");
    for (Object partition : partitions) {
      names.add((String) partition);
    }
    if (table != null) {
      request.put("catalog_table", table.identifier().quotedString());
    }
    // Spark may plan a write again while it runs.
    String write = execution() + ' ' + place + ' ' + options.hashCode();
    boolean isProven = execution() != null && write.equals(session.sparkContext().getLocalProperty(PROVEN));
    boolean needsKeys = !isProven;
    boolean isLocal = session.sparkContext().isLocal();
    // Executors have caches of their own: what is in that of the driver proves nothing for them.
    request.put("keys", needsKeys && !isLocal);
    try {
      // What Spark itself does on the driver, and in each task, later.
      Job job = Job.getInstance(configuration);
      format.prepareWrite(session, job, options, schema);
      WriteSupport.WriteContext context = new ParquetWriteSupport().init(job.getConfiguration());
      Configuration ours = KeytoolsCryptoFactory.checkWrite(job.getConfiguration(), place, file, context, request);
      if (ours != null && needsKeys && isLocal && KmsWorker.of(configuration).keysDependOnFiles()) {
        // Only tasks know the values of partitions.
        request.put("keys", true);
        KeytoolsCryptoFactory.checkWrite(job.getConfiguration(), place, file, context, request);
      } else if (ours != null && needsKeys && isLocal) {
        // Tasks find the KEKs in the cache that they share with the driver.
        new KeytoolsCryptoFactory().getFileEncryptionProperties(job.getConfiguration(), new Path("/new"), context);
      }
      if (needsKeys) {
        session.sparkContext().setLocalProperty(PROVEN, write);
      }
    } catch (IOException error) {
      throw new ParquetCryptoRuntimeException("The write cannot be checked: " + error);
    }
  }

  /** Each file would have its own columns, which only its task knows. */
  private void refuseShredding(StructType schema, Map options) {
    // Names of columns have no quotes in JSON.
    if (schema.json().contains("ype\":\"variant\"")) {
      String infers = value(options, INFERS_SHREDDING);
      if (infers == null) {
        infers = setting(INFERS_SHREDDING);
      }
      if ("true".equalsIgnoreCase(infers) && "true".equals(setting("spark.sql.variant.writeShredding.enabled"))) {
        throw new ParquetCryptoRuntimeException(
            "Spark would shred variants into columns that differ from file to file, and no table can say their keys."
                + " Give the write the option " + INFERS_SHREDDING + "=false, as keytools.spark_options does for a frame"
                + " with variants, or set it for the session or the table.");
      }
    }
  }

  /** Returns a setting of the session; false where this Spark has no such setting. */
  private String setting(String name) {
    try {
      return session.conf().get(name);
    } catch (NoSuchElementException error) {
      return "false";
    }
  }

  private void checkOthers(LogicalPlan plan) {
    CatalogTable table = tableOf((Product) plan);
    for (Iterator elements = ((Product) plan).productIterator(); elements.hasNext(); ) {
      Object element = elements.next();
      if (element instanceof Map) {
        refuseOthers(plan.nodeName(), (Map) element, table);
      } else if (element instanceof CatalogStorageFormat) {
        if (isHiveParquet((CatalogStorageFormat) element)) {
          refuseHive(((CatalogStorageFormat) element).properties());
        }
        refuseOthers(plan.nodeName(), ((CatalogStorageFormat) element).properties(), table);
      }
    }
  }

  /** Hive's writer asks parquet-java's factory, and tells it nothing of the options of the table. */
  private void refuseHive(Map options) {
    Configuration configuration = session.sessionState().newHadoopConfWithOptions(options);
    if (KeytoolsCryptoFactory.isOurs(configuration) && !KeytoolsCryptoFactory.isPlaintextAllowed(configuration)) {
      throw new ParquetCryptoRuntimeException(
          "Hive's own Parquet writer would be used, which encrypts nothing: it would be written in plaintext. Leave all"
              + " settings " + CONVERT + "... at true, so that Spark's writer is used.");
    }
  }

  private static boolean isHiveParquet(CatalogStorageFormat storage) {
    return storage.outputFormat().isDefined() && isParquet((String) storage.outputFormat().get());
  }

  private static boolean isHiveParquet(Map options) {
    return isParquet(value(options, "fileFormat")) || isParquet(value(options, "outputFormat"));
  }

  private static boolean isParquet(String format) {
    return format != null && format.toLowerCase(Locale.ROOT).contains("parquet");
  }

  /** Returns the value of an option in whatever case Spark has its name; null where there is none. */
  private static String value(Map options, String name) {
    String found = null;
    for (Iterator entries = options.iterator(); entries.hasNext(); ) {
      Tuple2 entry = (Tuple2) entries.next();
      if (name.equalsIgnoreCase((String) entry._1())) {
        found = (String) entry._2();
      }
    }
    return found;
  }

  /** Refuses what would be plaintext although options, a table or the session say that it is to be encrypted. */
  private void refuseOthers(String what, Map options, CatalogTable table) {
    String found = encryptionOption(options);
    String where = "its options name ";
    if (found == null && table != null) {
      where = "the table's options name ";
      found = encryptionOption(table.storage().properties());
    }
    if (found == null && table != null) {
      where = "the table's properties name ";
      found = encryptionOption(table.properties());
    }
    Configuration configuration = session.sessionState().newHadoopConfWithOptions(options);
    if (found == null && !KeytoolsCryptoFactory.isPlaintextAllowed(configuration)) {
      where = "the session names ";
      found = KeytoolsCryptoFactory.keyOption(configuration);
      if (found == null && session.sessionState().conf().contains(FACTORY)) {
        found = FACTORY;
      }
    }
    if (found != null) {
      throw new ParquetCryptoRuntimeException(
          "This write (" + what + ") would be written in plaintext, although " + where + found + ": Spark encrypts only"
              + " Parquet files, with " + FACTORY + ". Write Parquet with all options of keytools.spark_options, or leave"
              + " the options out.");
    }
  }

  /** Returns the first option that asks for encryption, in whatever case Spark has it; null where none does. */
  private static String encryptionOption(Map options) {
    for (Iterator entries = options.iterator(); entries.hasNext(); ) {
      String name = ((String) ((Tuple2) entries.next())._1()).toLowerCase(Locale.ROOT);
      if (name.equals(FACTORY) || name.startsWith("parquet.encryption.")
          || name.startsWith("parquet.keytools.") && !name.startsWith("parquet.keytools.plaintext.")) {
        return name;
      }
    }
    return null;
  }

  private static CatalogTable tableOf(Product plan) {
    for (Iterator elements = plan.productIterator(); elements.hasNext(); ) {
      Object element = elements.next();
      if (element instanceof Option && ((Option) element).isDefined()) {
        element = ((Option) element).get();
      }
      if (element instanceof CatalogTable) {
        return (CatalogTable) element;
      }
    }
    return null;
  }

  private boolean exists(Path path) {
    try {
      return path.getFileSystem(session.sessionState().newHadoopConf()).exists(path);
    } catch (IOException error) {
      return false;
    }
  }

  private static boolean isAmong(Attribute column, Seq columns) {
    for (Iterator others = columns.iterator(); others.hasNext(); ) {
      if (((Attribute) others.next()).exprId().equals(column.exprId())) {
        return true;
      }
    }
    return false;
  }

  private boolean isNamed(String name, Seq names) {
    boolean isExact = session.sessionState().conf().caseSensitiveAnalysis();
    for (Iterator others = names.iterator(); others.hasNext(); ) {
      String other = (String) others.next();
      if (isExact ? other.equals(name) : other.equalsIgnoreCase(name)) {
        return true;
      }
    }
    return false;
  }
}
