//! The examples of `docs/user/cloneset.md`, in their order: applied, and acted upon.

use std::collections::BTreeMap;

use kruise_api::cloneset::CloneSet;
use serde_json::Value;

use crate::field::Field;
use crate::world::world;

/// A block of YAML, and what the word after `yaml` says: the reason of condition Progressing that it leads to, and
/// which CloneSet it is a patch of.
struct Example {
    yaml: String,
    reason: String,
    set: String,
}

fn examples() -> Vec<Example> {
    let path = format!("{}/../docs/user/cloneset.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let blocks = text.split("\n```yaml").skip(1).map(|rest| {
        let (words, rest) = rest.split_once('\n').unwrap();
        let mut words = words.split_whitespace().map(str::to_owned);
        Example {
            yaml: rest.split("\n```").next().unwrap().to_owned(),
            reason: words.next().unwrap_or("CloneSetAvailable".to_owned()),
            set: words.next().unwrap_or("web".to_owned()),
        }
    });
    blocks.collect()
}

/// The message of condition Progressing once it has that reason.
async fn told(field: &Field, name: &str, reason: &str, words: &str) -> String {
    let progressing = |set: &CloneSet| {
        let conditions = set.status.iter().flat_map(|s| &s.conditions);
        let mut of = conditions.filter(|c| c.type_ == "Progressing");
        of.next().cloned()
    };
    let waits = |set: &CloneSet| {
        let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
        conditions.any(|c| c.type_ == "Waiting" && c.message.contains(words))
    };
    let said = |set: &CloneSet| {
        progressing(set).is_some_and(|c| c.reason == reason) && (words.is_empty() || waits(set))
    };
    let set = field.status(name, "as the page says", said).await;
    progressing(&set).unwrap().message
}

/// Whether the autoscaler is there, and means a CloneSet that is there.
async fn applied(field: &Field, printed: &Value) -> bool {
    let scalers = field.api("autoscaling", "v2", "HorizontalPodAutoscaler");
    let name = printed["metadata"]["name"].as_str().unwrap();
    let stored = scalers.get(name).await.unwrap();
    let target = &stored.data["spec"]["scaleTargetRef"];
    let set = target["name"].as_str().unwrap();
    let scale = field.sets().get_scale(set).await.unwrap();
    *target == printed["spec"]["scaleTargetRef"] && scale.spec.is_some_and(|spec| spec.replicas.is_some())
}

#[tokio::test]
async fn the_page_s_examples_do_what_it_says() {
    let field = Field::new(world(), "page").await;
    let examples = examples();
    let mut kinds = BTreeMap::<String, usize>::new();
    for Example { yaml, reason, set } in examples {
        let object: Value = serde_yaml::from_str(&yaml).unwrap();
        let kind = object["kind"].as_str();
        *kinds.entry(kind.unwrap_or("a patch").to_owned()).or_default() += 1;
        let name = match kind {
            None => {
                field.edit(&set, object).await;
                set
            }
            Some(kind) => {
                let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
                std::fs::write(file.path(), &yaml).unwrap();
                let namespace = format!("--namespace={}", field.namespace);
                let apply = ["apply", &namespace, "-f", file.path().to_str().unwrap()];
                field.world.plane.kubectl(&apply).unwrap();
                if kind != "CloneSet" {
                    // Nobody counts load here: `tests/node_rollout/autoscaling.rs` has it acted upon.
                    assert_eq!(
                        (kind, applied(&field, &object).await),
                        ("HorizontalPodAutoscaler", true)
                    );
                    continue;
                }
                object["metadata"]["name"].as_str().unwrap().to_owned()
            }
        };
        let words = match (name.as_str(), reason.as_str()) {
            ("tuned", "CloneSetUpdated") => {
                "container app: the change of its environment is not confirmed yet"
            }
            ("careful", "CloneSetUpdated") => "hook inPlaceUpdate: finalizer example.com/drain to be removed",
            _ => "",
        };
        // Condition Progressing is there with a deadline.
        let deadline = serde_json::json!({ "spec": { "progressDeadlineSeconds": 3600 } });
        field.edit(&name, deadline).await;
        told(&field, &name, &reason, words).await;
    }
    let counted = [("CloneSet", 6), ("HorizontalPodAutoscaler", 1), ("a patch", 13)];
    assert_eq!(
        kinds,
        counted.map(|(kind, count)| (kind.to_owned(), count)).into()
    );
    for reason in [
        "SuccessfulUpdatePodInPlace",
        "SuccessfulUpdatePodReCreate",
        "CreatedImagePullJob",
    ] {
        field.event(reason, "web").await;
    }
}
