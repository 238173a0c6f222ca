package parquet_keytools;

import java.util.Collections;
import java.util.Set;
import java.util.WeakHashMap;
import org.apache.spark.sql.SparkSessionExtensions;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.SparkStrategy;
import scala.Function1;
import scala.collection.immutable.Seq;
import scala.runtime.BoxedUnit;

/** What `spark.sql.extensions` names: it lets a session check each write while Spark plans it. */
public class SessionExtension implements Function1 {
  /** Sessions with the check. */
  private static final Set CHECKED = Collections.synchronizedSet(Collections.newSetFromMap(new WeakHashMap()));

  public Object apply(Object extensions) {
    ((SparkSessionExtensions) extensions).injectPlannerStrategy(new Function1() {
      public Object apply(Object session) {
        CHECKED.add(session);
        return new WriteCheck((SparkSession) session);
      }
    });
    return BoxedUnit.UNIT;
  }

  /** Lets a session that runs check its writes, which `spark.sql.extensions` cannot change any more. */
  public static void install(SparkSession session) {
    // Spark asks an extension for its strategies with each plan.
    session.sessionState().planner().strategies();
    if (CHECKED.add(session)) {
      Seq strategies = session.experimental().extraStrategies();
      session.experimental().extraStrategies_$eq((Seq) strategies.prepended((SparkStrategy) new WriteCheck(session)));
    }
  }
}
