//! Each field of each kind, in both versions, with what should not be in it. The fields are those of the schemas, so new
//! ones are among them.

use std::sync::Arc;

use futures::{StreamExt, stream};
use kruise_cluster::Cluster;
use serde_json::{Value, json};

use crate::templates;
use crate::world::{NODE, Objects, clone_set, target, world};

/// Objects that are created at a time.
pub const AT_A_TIME: usize = 8;

/// One step from an object to a field of it.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Item,
    Entry,
}

/// A field and its schema.
#[derive(Clone, Debug)]
struct Field {
    path: Vec<Step>,
    schema: Value,
    /// The schema of the object that it is in.
    root: Arc<Value>,
}

/// Refusals that do not name the field itself: a part of its path, words of the refusal, and why.
const NAMED_OTHERWISE: &[(&str, &str, &str)] = &[
    (
        "spec.scaleStrategy.podsToDelete[0]",
        "spec.scaleStrategy.podsToDelete: Invalid value: ",
        "the list is a set, and the value says which item it is",
    ),
    (
        "spec.selector.matchExpressions[0].",
        "spec.selector.matchExpressions do not match spec.template.metadata.labels",
        "the policy holds all of them together against the template",
    ),
    (
        "spec.selector.matchLabels.",
        "spec.selector.matchLabels does not match spec.template.metadata.labels",
        "the same",
    ),
    (
        "elector.matchLabels",
        "elector: Invalid value: an empty selector matches every Pod; give matchLabels or matchExpressions",
        "either would do",
    ),
    (
        "spec.template.spec.activeDeadlineSeconds",
        "spec.template.spec: Forbidden: activeDeadlineSeconds would end Pods that are to run for ever",
        "a rule of the schema cannot forbid the field that it stands at",
    ),
    (
        "spec.containers[0].preStop.",
        "spec.containers[0].preStop: Invalid value: ",
        READ_ONLY,
    ),
    (
        "spec.containers[0].ports[0]",
        "spec.containers[0].ports: Invalid value: ",
        READ_ONLY,
    ),
    (
        "spec.containers[0].statusContext.",
        "spec.containers[0].statusContext: Invalid value: ",
        READ_ONLY,
    ),
];

const READ_ONLY: &str = "the webhook refuses all of it, whatever it is";

/// Whether the words name the field, or one below it. The webhooks have keys of maps in brackets.
pub fn is_named(field: &str, words: &str) -> bool {
    let (mut text, mut open) = (words.chars().peekable(), false);
    let mut words = String::with_capacity(words.len());
    while let Some(next) = text.next() {
        let key = text.peek().is_some_and(char::is_ascii_alphabetic);
        let opens = next == '[' && key && words.ends_with(|last: char| last.is_ascii_alphanumeric());
        if !(open && next == ']') {
            words.push(if opens { '.' } else { next });
        }
        open = opens || (open && next != ']');
    }
    let mut at = words
        .match_indices(field)
        .map(|(at, _)| &words[at + field.len()..]);
    at.any(|rest| !rest.starts_with(|next: char| next.is_ascii_alphanumeric()))
}

/// Whether a refusal names the field. The webhooks see every object in v1beta1.
fn names(words: &str, version: &str, field: &str) -> bool {
    let beta = field
        .replace(
            ".updateStrategy.type",
            ".updateStrategy.rollingUpdate.podUpdatePolicy",
        )
        .replace(".updateStrategy.", ".updateStrategy.rollingUpdate.")
        .replace(".rollingUpdate.rollingUpdate.", ".rollingUpdate.");
    // The API server's words for what it cannot read of a template begin at that.
    let unread = field
        .strip_prefix("spec.")
        .filter(|_| words.contains("Go struct field"));
    // Kubernetes 1.34 says of a value that it is an object.
    let words = &words.replace("Invalid value: \"object\": ", "Invalid value: ");
    is_named(field, words)
        || unread.is_some_and(|below| is_named(below, words))
        || templates::names(field, words)
        || (version == "v1alpha1" && is_named(&beta, words))
        || NAMED_OTHERWISE
            .iter()
            .any(|(part, said, _)| field.contains(part) && words.contains(said))
}

fn walk(root: &Arc<Value>, schema: &Value, path: &[Step], found: &mut Vec<Field>) {
    let below = |step| [path, &[step]].concat();
    for (name, child) in schema["properties"].as_object().into_iter().flatten() {
        walk(root, child, &below(Step::Field(name.clone())), found);
    }
    for (keyword, step) in [("items", Step::Item), ("additionalProperties", Step::Entry)] {
        if schema[keyword].is_object() {
            walk(root, &schema[keyword], &below(step), found);
        }
    }
    found.push(Field {
        path: path.to_vec(),
        schema: schema.clone(),
        root: Arc::clone(root),
    });
}

/// A good value for what must be there beside the field that is tried.
fn sample(name: &str, schema: &Value) -> Value {
    match schema["type"].as_str() {
        Some("string") if name == "operator" => json!("Exists"),
        Some("string") if schema["format"] == "date-time" => json!("2026-01-01T00:00:00Z"),
        Some("string") => match schema["enum"].as_array() {
            Some(words) => words.iter().find(|word| *word != "").unwrap().clone(),
            None => json!("x"),
        },
        Some("array") => json!([]),
        Some("object") if name == "matchSelector" => json!({ "matchLabels": { "a": "b" } }),
        Some("object") => json!({}),
        Some("boolean") => json!(true),
        _ => json!(1),
    }
}

/// The object with `value` at the end of the path. What is missing on the way is made, with all that it must have.
fn put(object: &mut Value, schema: &Value, path: &[Step], value: Value) -> String {
    let Some((first, rest)) = path.split_first() else {
        *object = value;
        return String::new();
    };
    match first {
        Step::Field(name) => {
            for required in schema["required"].as_array().into_iter().flatten() {
                let required = required.as_str().unwrap();
                let there = entry(object, required);
                if there.is_null() {
                    *there = match (required, name.as_str()) {
                        ("operator", "values") => json!("In"),
                        _ => sample(required, &schema["properties"][required]),
                    };
                }
            }
            let below = put(entry(object, name), &schema["properties"][name], rest, value);
            format!(".{name}{below}")
        }
        Step::Entry => {
            let known = object
                .as_object()
                .and_then(|fields| fields.keys().next().cloned());
            let key = known.unwrap_or_else(|| "k".to_owned());
            let below = put(entry(object, &key), &schema["additionalProperties"], rest, value);
            format!(".{key}{below}")
        }
        Step::Item => {
            if object.as_array().is_none_or(Vec::is_empty) {
                *object = json!([null]);
            }
            let below = put(&mut object[0], &schema["items"], rest, value);
            format!("[0]{below}")
        }
    }
}

fn entry<'a>(object: &'a mut Value, name: &str) -> &'a mut Value {
    if !object.is_object() {
        *object = json!({});
    }
    &mut object[name]
}

/// What may be tried in a field of this schema: what is no value of its type, and the ends of its type.
pub fn hostile(schema: &Value) -> Vec<Value> {
    let deep = (0..100).fold(json!(1), |inner, _| json!([{ "a": inner }]));
    let mut all = vec![
        json!(true),
        json!("x"),
        json!(5),
        json!([{}]),
        json!({ "?": "../x" }),
        deep,
    ];
    match schema["type"].as_str() {
        Some("array") => all.push(json!([])),
        Some("object") => all.push(json!({})),
        _ => {}
    }
    let any = schema["x-kubernetes-int-or-string"] == true;
    if any || schema["type"] == "integer" {
        all.extend([json!(0), json!(-1), json!(1.5), json!(1e300)]);
        let ends = [
            i64::from(i32::MAX),
            i64::from(i32::MAX) + 1,
            i64::from(i32::MIN),
            i64::MAX,
            i64::MIN,
        ];
        all.extend(ends.map(Value::from));
    }
    if is_text(schema) {
        let texts = [
            "",
            "x?y=",
            "../x",
            "a/b",
            "\u{1}\n\u{1b}[31m",
            "9999-12-31T23:59:59Z",
            "-1%",
            "99999999999999999999%",
        ];
        all.extend(texts.map(Value::from));
    }
    all
}

fn is_text(schema: &Value) -> bool {
    schema["type"] == "string" || schema["x-kubernetes-int-or-string"] == true
}

/// A spec that is good but for what is tried. NodeImage has that of an image, which is added to the node's.
fn good(kind: &str, number: usize) -> Value {
    match kind {
        // A few have Pods.
        "CloneSet" => clone_set("fields", i32::from(number.is_multiple_of(16))),
        "ImagePullJob" => json!({ "image": "hostile:1", "completionPolicy": {} }),
        "NodeImage" => {
            json!({ "images": { "hostile": { "tags": [{ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 1 } }] } } })
        }
        "ContainerRecreateRequest" => {
            json!({ "podName": target(number), "containers": [{ "name": "main" }] })
        }
        kind => panic!("{kind} is new: give it a good spec here"),
    }
}

/// A status that is good but for what is tried.
fn good_status(kind: &str) -> Value {
    match kind {
        "CloneSet" => {
            json!({ "replicas": 0, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 0,
            "updatedReadyReplicas": 0 })
        }
        "NodeImage" => {
            json!({ "desired": 1, "imageStatuses": { "hostile": { "tags": [{ "tag": "1", "phase": "Waiting",
            "progress": 0, "version": 0 }] } } })
        }
        _ => json!({}),
    }
}

/// One value in one field.
pub struct Attempt {
    pub version: String,
    pub name: String,
    /// The field, as the API server writes it.
    pub field: String,
    pub object: Value,
}

impl Attempt {
    fn new(kind: &str, version: &str, number: usize, field: &Field, value: Value) -> Self {
        let mut object = json!({ "spec": good(kind, number) });
        let path = put(&mut object, &field.root, &field.path, value);
        Self {
            version: version.to_owned(),
            name: format!("{}-{version}-{number}", kind.to_lowercase()),
            field: path.trim_start_matches('.').to_owned(),
            object,
        }
    }

    /// The same for a status of one of [`AT_A_TIME`] objects that are there.
    fn of_status(kind: &str, version: &str, number: usize, field: &Field, value: Value) -> Self {
        let mut object = json!({ "status": good_status(kind) });
        let path = put(&mut object, &field.root, &field.path, value);
        Self {
            version: version.to_owned(),
            name: status_target(kind, number),
            field: path.trim_start_matches('.').to_owned(),
            object,
        }
    }

    /// The name of the object where it was accepted.
    ///
    /// # Errors
    /// A refusal that does not name the field.
    async fn make(mut self, cluster: &Cluster, kind: &str) -> Result<Option<String>, String> {
        let objects = Objects::ours(cluster, &self.version, kind);
        let done = if self.object["status"].is_null() && kind != "NodeImage" {
            self.object["metadata"] = json!({ "name": self.name });
            objects.make(&self.object).await
        } else {
            // There is one, and each patch of it may meet another one.
            loop {
                let done = if self.object["status"].is_null() {
                    objects.merge(NODE, &self.object).await
                } else {
                    objects.merge_status(&self.name, &self.object).await
                };
                if !done
                    .as_ref()
                    .is_err_and(|words| words.contains("the object has been modified"))
                {
                    break done;
                }
            }
        };
        let Err(words) = done else {
            return Ok(Some(self.name));
        };
        // What is too deep or too long is read by nobody, so nobody can say where it is.
        let unread = ["may be nested", "is too large", "larger than max"];
        if names(&words, &self.version, &self.field) || unread.iter().any(|said| words.contains(said)) {
            return Ok(None);
        }
        // The rest repeats them.
        let words = words.split(" (Status").next().unwrap_or_default();
        let words: String = words.chars().take(1000).collect();
        Err(format!("{} {}: {words}", self.version, self.field))
    }
}

/// An object whose status is tried.
fn status_target(kind: &str, number: usize) -> String {
    match kind {
        "NodeImage" => NODE.to_owned(),
        kind => format!("{}-status-{}", kind.to_lowercase(), number % AT_A_TIME),
    }
}

/// The fields of `spec`, or `status`, in each version.
fn fields(kind: &str, part: &str) -> Vec<(String, Field)> {
    let crds = kruise_api::crds();
    let crd = crds.into_iter().find(|crd| crd.spec.names.kind == kind).unwrap();
    let crd = serde_json::to_value(crd).unwrap();
    let mut all = Vec::new();
    for version in crd["spec"]["versions"].as_array().unwrap() {
        let name = version["name"].as_str().unwrap();
        let mut fields = Vec::new();
        let root = Arc::new(version["schema"]["openAPIV3Schema"].clone());
        walk(
            &root,
            &root["properties"][part],
            &[Step::Field(part.into())],
            &mut fields,
        );
        assert!(fields.len() > 10, "{kind} {name} has {} fields", fields.len());
        all.extend(fields.into_iter().map(|field| (name.to_owned(), field)));
    }
    all
}

/// Makes all attempts; the names of the objects that were accepted.
pub async fn attempt(attempts: Vec<Attempt>, at_a_time: usize, admin: &Cluster, kind: &str) -> Vec<String> {
    let asked = stream::iter(attempts).map(|attempt| attempt.make(admin, kind));
    let (mut accepted, mut unnamed) = (Vec::new(), Vec::new());
    let mut answers = asked.buffer_unordered(at_a_time);
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(name) => accepted.extend(name),
            Err(words) => unnamed.push(words),
        }
    }
    let count = unnamed.len();
    assert!(
        unnamed.is_empty(),
        "{count} refusals name another field:\n{}",
        unnamed.join("\n")
    );
    accepted
}

/// Tries everything in every field of `spec`, and of `status`.
async fn try_all(kind: &'static str) {
    let world = world().await;
    let admin = &world.admin().await;
    let (mut light, mut heavy) = (Vec::new(), Vec::new());
    for (version, field) in fields(kind, "spec") {
        for value in hostile(&field.schema) {
            let many = value.as_i64().is_some_and(|number| number > 100);
            let mut attempt = Attempt::new(kind, &version, light.len(), &field, value);
            if many && field.path.last() == Some(&Step::Field("replicas".into())) {
                // Or as many Pods would be made, one after the other: the API server takes none with such a class.
                attempt.object["spec"]["template"]["spec"]["priorityClassName"] = json!("missing");
            }
            light.push(attempt);
        }
        if is_text(&field.schema) {
            let number = 1_000_000 + heavy.len();
            let large = "a".repeat(1 << 20).into();
            heavy.push(Attempt::new(kind, &version, number, &field, large));
        }
    }
    let count = light.len();
    let mut accepted = attempt(light, AT_A_TIME, admin, kind).await;
    assert!(
        !accepted.is_empty() && accepted.len() < count,
        "{} of {count} were accepted",
        accepted.len()
    );
    accepted.extend(attempt(heavy, 1, admin, kind).await);
    accepted.extend(try_status(kind, admin).await);
    world.still_works(&format!("after-{}", kind.to_lowercase())).await;
    // What is left of this is not what the next test is about.
    let objects = Objects::ours(admin, "v1beta1", kind);
    if kind == "NodeImage" {
        objects
            .merge(NODE, &json!({ "spec": { "images": null } }))
            .await
            .unwrap();
        return;
    }
    let removed = stream::iter(&accepted).map(|name| objects.remove(name));
    removed.buffer_unordered(AT_A_TIME).collect::<()>().await;
}

/// Tries everything in every field of `status`, of objects that both programs look after; the names of these.
async fn try_status(kind: &'static str, admin: &Cluster) -> Vec<String> {
    let objects = Objects::ours(admin, "v1beta1", kind);
    let names: Vec<String> = (0..AT_A_TIME).map(|number| status_target(kind, number)).collect();
    if kind == "NodeImage" {
        objects
            .merge(NODE, &json!({ "spec": good(kind, 0) }))
            .await
            .unwrap();
    } else {
        for (number, name) in names.iter().enumerate() {
            let object = json!({ "metadata": { "name": name }, "spec": good(kind, number) });
            objects.make(&object).await.unwrap();
        }
    }
    let (mut light, mut heavy) = (Vec::new(), Vec::new());
    let all = fields(kind, "status");
    let in_beta = |tried: &Field| {
        let mut beta = all.iter().filter(|(version, _)| version == "v1beta1");
        beta.any(|(_, field)| field.path == tried.path && field.schema == tried.schema)
    };
    for (version, field) in &all {
        // Once is enough: the versions have most of it in common, and the objects are the same.
        if version == "v1alpha1" && in_beta(field) {
            continue;
        }
        for value in hostile(&field.schema) {
            light.push(Attempt::of_status(kind, version, light.len(), field, value));
        }
        if is_text(&field.schema) {
            let large = "a".repeat(1 << 20).into();
            heavy.push(Attempt::of_status(kind, version, heavy.len(), field, large));
        }
    }
    let count = light.len();
    let accepted = attempt(light, AT_A_TIME, admin, kind).await.len();
    assert!(
        accepted > 0 && accepted < count,
        "{accepted} of {count} were accepted"
    );
    attempt(heavy, 1, admin, kind).await;
    if kind == "NodeImage" { Vec::new() } else { names }
}

#[tokio::test]
async fn a_cloneset_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("CloneSet").await;
}

#[tokio::test]
async fn a_job_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("ImagePullJob").await;
}

#[tokio::test]
async fn a_recreate_request_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("ContainerRecreateRequest").await;
}

#[tokio::test]
async fn a_node_image_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("NodeImage").await;
}
