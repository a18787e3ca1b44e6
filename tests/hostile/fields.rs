//! Invalid values in each field of each kind, in both versions. The fields come from the schemas, so new ones are
//! included.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{StreamExt, stream};
use kruise_cluster::Cluster;
use serde_json::{Value, json};

use crate::full_cluster::{MAX_CONCURRENT, NODE, Objects, cloneset_spec, exclusive_cluster, target};
use crate::templates;

/// Objects of a part.
const ATTEMPTS_IN_PART: usize = 200;

/// One step from an object to a field of it.
#[derive(Clone, Debug, PartialEq)]
enum PathStep {
    Field(String),
    Item,
    Entry,
}

/// A field and its schema.
#[derive(Clone, Debug)]
struct SchemaField {
    path: Vec<PathStep>,
    schema: Value,
    /// Schema of the root object.
    root: Arc<Value>,
}

/// Rejections that do not name the field itself: part of its path, part of the message, and why.
const OTHER_FIELD_MESSAGES: &[(&str, &str, &str)] = &[
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
        "spec.selector.matchLabels",
        "spec.selector: Invalid value: spec.selector is empty; give at least one label",
        "either would do",
    ),
    (
        ".markerPolicy[0].",
        ".markerPolicy[0]: Invalid value: a policy has neither labels nor annotations",
        "either would do",
    ),
    (
        ".podConditionType",
        "spec.probes[0]: Invalid value: a probe needs a podConditionType or a markerPolicy",
        "the same",
    ),
    (
        ".exec.command",
        ".exec: Invalid value: exec has no command",
        "a rule of the schema cannot require the field that it stands at",
    ),
    (
        "spec.selector",
        "spec: Invalid value: give spec.selector or spec.targetRef",
        "either would do",
    ),
    (
        "spec.targetRef",
        "spec: Invalid value: give spec.selector or spec.targetRef",
        "the same",
    ),
    (
        "spec.targetRef.",
        "spec.targetRef: Invalid value: apiVersion must be apps/v1",
        "kind and version belong together",
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
    (
        ".podInjectPolicy",
        "spec.container.podInjectPolicy: ",
        SIDECAR_SET,
    ),
    (
        ".shareVolumePolicy",
        "spec.container.shareVolumePolicy: ",
        SIDECAR_SET,
    ),
    (".resourcesPolicy", "spec[0].resourcesPolicy", SIDECAR_SET),
    (
        ".sourceContainerNameFrom",
        "spec[0].transferEnv.fieldRef.fieldPath: ",
        SIDECAR_SET,
    ),
    (
        "spec.containers",
        "spec: Required value: no initContainer or container",
        SIDECAR_SET,
    ),
    (
        "spec.injectionStrategy.revision",
        "revision: Invalid value: ",
        SIDECAR_SET,
    ),
    (
        "spec.namespace",
        "spec.namespaceSelector.matchLabels: Invalid value: ",
        "conversion writes the namespace there",
    ),
    (
        "elector.match",
        "elector.matchLabels: Invalid value: ",
        SIDECAR_SET,
    ),
    (
        "elector.match",
        "empty selector is not valid for sidecarset",
        SIDECAR_SET,
    ),
    (
        "spec.patchPodMetadata",
        "spec.patchPodMetadata: Required value: ",
        SIDECAR_SET,
    ),
    (
        ".priorityStrategy.",
        "spec.updateStrategy.priorityStrategy: Required value: ",
        SIDECAR_SET,
    ),
    (
        ".scatterStrategy[0].",
        "spec.updateStrategy.scatterStrategy: Required value: ",
        SIDECAR_SET,
    ),
];

const SIDECAR_SET: &str = "OpenKruise's field for it in SidecarSets";

const READ_ONLY: &str = "the webhook refuses all of it, whatever it is";

/// Whether the message names the field, or one below it. The webhooks write map keys in brackets.
pub fn mentions_field(field: &str, message: &str) -> bool {
    let (mut chars, mut in_brackets) = (message.chars().peekable(), false);
    let mut normalized = String::with_capacity(message.len());
    while let Some(next) = chars.next() {
        let key = chars.peek().is_some_and(char::is_ascii_alphabetic);
        let opens = next == '[' && key && normalized.ends_with(|last: char| last.is_ascii_alphanumeric());
        if !(in_brackets && next == ']') {
            normalized.push(if opens { '.' } else { next });
        }
        in_brackets = opens || (in_brackets && next != ']');
    }
    let mut suffixes = normalized
        .match_indices(field)
        .map(|(index, _)| &normalized[index + field.len()..]);
    suffixes.any(|suffix| !suffix.starts_with(|next: char| next.is_ascii_alphanumeric()))
}

/// Whether a rejection names the field. The webhooks see every object in v1beta1.
fn names_field(message: &str, version: &str, field: &str) -> bool {
    let beta = field
        .replace(
            ".updateStrategy.type",
            ".updateStrategy.rollingUpdate.podUpdatePolicy",
        )
        .replace(".updateStrategy.", ".updateStrategy.rollingUpdate.")
        .replace(".rollingUpdate.rollingUpdate.", ".rollingUpdate.");
    // The API server's error for a template that it cannot parse begins at that.
    let unread = field
        .strip_prefix("spec.")
        .filter(|_| message.contains("Go struct field"));
    // Kubernetes 1.34 reports the type of a value as an object.
    let normalized = &message.replace("Invalid value: \"object\": ", "Invalid value: ");
    mentions_field(field, normalized)
        || unread.is_some_and(|below| mentions_field(below, normalized))
        || templates::names_field(field, normalized)
        || (version == "v1alpha1" && mentions_field(&beta, normalized))
        || OTHER_FIELD_MESSAGES
            .iter()
            .any(|(part, text, _)| field.contains(part) && normalized.contains(text))
}

fn collect_fields(root: &Arc<Value>, schema: &Value, path: &[PathStep], found: &mut Vec<SchemaField>) {
    let below = |step| [path, &[step]].concat();
    for (name, child) in schema["properties"].as_object().into_iter().flatten() {
        collect_fields(root, child, &below(PathStep::Field(name.clone())), found);
    }
    for (keyword, step) in [
        ("items", PathStep::Item),
        ("additionalProperties", PathStep::Entry),
    ] {
        if schema[keyword].is_object() {
            collect_fields(root, &schema[keyword], &below(step), found);
        }
    }
    found.push(SchemaField {
        path: path.to_vec(),
        schema: schema.clone(),
        root: Arc::clone(root),
    });
}

/// A valid value for what the tried field requires next to it.
fn sample_value(name: &str, schema: &Value) -> Value {
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

/// Sets `value` at the end of the path. Missing parents are created, with all their required fields.
fn set_at_path(object: &mut Value, schema: &Value, path: &[PathStep], value: Value) -> String {
    let Some((first, remaining)) = path.split_first() else {
        *object = value;
        return String::new();
    };
    match first {
        PathStep::Field(name) => {
            for required in schema["required"].as_array().into_iter().flatten() {
                let required = required.as_str().unwrap();
                let existing = entry_mut(object, required);
                if existing.is_null() {
                    *existing = match (required, name.as_str()) {
                        ("operator", "values") => json!("In"),
                        _ => sample_value(required, &schema["properties"][required]),
                    };
                }
            }
            let below = set_at_path(
                entry_mut(object, name),
                &schema["properties"][name],
                remaining,
                value,
            );
            format!(".{name}{below}")
        }
        PathStep::Entry => {
            let existing_key = object
                .as_object()
                .and_then(|fields| fields.keys().next().cloned());
            let key = existing_key.unwrap_or_else(|| "k".to_owned());
            let below = set_at_path(
                entry_mut(object, &key),
                &schema["additionalProperties"],
                remaining,
                value,
            );
            format!(".{key}{below}")
        }
        PathStep::Item => {
            if object.as_array().is_none_or(Vec::is_empty) {
                *object = json!([null]);
            }
            let below = set_at_path(&mut object[0], &schema["items"], remaining, value);
            format!("[0]{below}")
        }
    }
}

fn entry_mut<'a>(object: &'a mut Value, name: &str) -> &'a mut Value {
    if !object.is_object() {
        *object = json!({});
    }
    &mut object[name]
}

/// Invalid values for a field of this schema: of other types, and the limits of its type.
pub fn malformed_values(schema: &Value) -> Vec<Value> {
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
    let int_or_string = schema["x-kubernetes-int-or-string"] == true;
    if int_or_string || schema["type"] == "integer" {
        all.extend([json!(0), json!(-1), json!(1.5), json!(1e300)]);
        let extremes = [
            i64::from(i32::MAX),
            i64::from(i32::MAX) + 1,
            i64::from(i32::MIN),
            i64::MAX,
            i64::MIN,
        ];
        all.extend(extremes.map(Value::from));
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

/// A text that is longer than the schema allows, or as long as an object can hold.
fn long_text(schema: &Value) -> Value {
    let max_length = schema["maxLength"].as_u64().unwrap_or(1 << 20);
    "a".repeat(usize::try_from(max_length).unwrap() + 1).into()
}

/// Whether another version has the same field, or `containers` has that of `initContainers`.
fn is_repeated(fields: &[(String, SchemaField)], version: &str, field: &SchemaField) -> bool {
    let mut path = field.path.clone();
    for step in &mut path {
        if *step == PathStep::Field("initContainers".into()) {
            *step = PathStep::Field("containers".into());
        }
    }
    if version == "v1beta1" && path == field.path {
        return false;
    }
    let mut first = fields.iter().filter(|(first, _)| first == "v1beta1");
    first.any(|(_, first)| first.path == path && first.schema == field.schema)
}

/// Whether the schema lets the value through to the webhooks, as far as its type says it.
pub fn has_type(schema: &Value, value: &Value) -> bool {
    match schema["type"].as_str() {
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64(),
        Some("boolean") => value.is_boolean(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => true,
    }
}

/// Number of the next SidecarSet.
static SIDECAR_SETS: AtomicUsize = AtomicUsize::new(0);

/// A spec that is valid except for the tried field. For NodeImage it is that of an image, which is added to the node's.
fn valid_spec(kind: &str, number: usize) -> Value {
    match kind {
        // A few have Pods.
        "CloneSet" => cloneset_spec("fields", i32::from(number.is_multiple_of(16))),
        "ImagePullJob" => json!({ "image": "hostile:1", "completionPolicy": {} }),
        "NodeImage" => {
            json!({ "images": { "hostile": { "tags": [{ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 1 } }] } } })
        }
        "ImageListPullJob" => json!({ "images": ["hostile:1"], "completionPolicy": {} }),
        "ContainerRecreateJob" => {
            json!({ "selector": { "matchLabels": { "hostile": "none" } }, "containers": [{ "name": "main" }],
                "paused": number.is_multiple_of(2) })
        }
        "PodProbeMarker" => {
            json!({ "selector": { "matchLabels": { "hostile": "probes" } }, "probes": [{ "name": "p",
                "containerName": "main", "podConditionType": "hostile/p", "probe": { "tcpSocket": { "port": 1 } } }] })
        }
        // The manager writes it too, and removes what no PodProbeMarker asks for.
        "NodePodProbe" => {
            json!({ "podProbes": [{ "name": target(number), "namespace": "default", "uid": "u", "IP": "127.0.0.1",
                "probes": [{ "name": "m#p", "containerName": "main", "probe": { "tcpSocket": { "port": 1 } } }] }] })
        }
        "ContainerRecreateRequest" => {
            json!({ "podName": target(number), "containers": [{ "name": "main" }] })
        }
        // They may not conflict with each other.
        "SidecarSet" => {
            let number = SIDECAR_SETS.fetch_add(1, Ordering::Relaxed);
            json!({ "selector": { "matchLabels": { "hostile": format!("n{number}") } },
                "initContainers": [{ "name": format!("i{number}"), "image": "i:1" }],
                "containers": [{ "name": format!("c{number}"), "image": "i:1" }] })
        }
        kind => panic!("{kind} is new: give it a good spec here"),
    }
}

/// A status that is valid except for the tried field.
fn valid_status(kind: &str) -> Value {
    match kind {
        "CloneSet" => {
            json!({ "replicas": 0, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 0,
            "updatedReadyReplicas": 0 })
        }
        "NodeImage" => {
            json!({ "desired": 1, "imageStatuses": { "hostile": { "tags": [{ "tag": "1", "phase": "Waiting",
            "progress": 0, "version": 0 }] } } })
        }
        "NodePodProbe" => {
            json!({ "podProbeStatuses": [{ "name": "p", "namespace": "default", "uid": "u", "probeStates": [{
                "name": "m#p", "state": "Succeeded" }] }] })
        }
        _ => json!({}),
    }
}

/// Whether there is one object for each node: it is changed, not created.
fn is_of_node(kind: &str) -> bool {
    ["NodeImage", "NodePodProbe"].contains(&kind)
}

/// Attempts in parallel: patches of one object conflict with each other.
fn max_concurrent(kind: &str) -> usize {
    if is_of_node(kind) { 1 } else { MAX_CONCURRENT }
}

/// The version in which objects of the kind are stored.
fn stored_version(kind: &str) -> &'static str {
    match kind {
        "PodProbeMarker" | "NodePodProbe" | "ContainerRecreateJob" => "v1alpha1",
        _ => "v1beta1",
    }
}

/// Removes the probe's own handler if another one is tried: it must have exactly one.
fn keep_one_handler(object: &mut Value) {
    let probe = object.pointer_mut("/spec/probes/0/probe");
    let Some(probe) = probe.and_then(Value::as_object_mut) else {
        return;
    };
    if ["exec", "httpGet", "grpc"]
        .iter()
        .any(|handler| probe.contains_key(*handler))
    {
        probe.remove("tcpSocket");
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
    fn new(kind: &str, version: &str, number: usize, field: &SchemaField, value: Value) -> Self {
        let mut object = json!({ "spec": valid_spec(kind, number) });
        let path = set_at_path(&mut object, &field.root, &field.path, value);
        if kind == "PodProbeMarker" {
            keep_one_handler(&mut object);
        }
        // The selector and the workload exclude each other.
        if path.starts_with(".spec.targetRef")
            && let Some(spec) = object["spec"].as_object_mut()
        {
            spec.remove("selector");
        }
        Self {
            version: version.to_owned(),
            name: format!("{}-{version}-{number}", kind.to_lowercase()),
            field: path.trim_start_matches('.').to_owned(),
            object,
        }
    }

    /// The same for the status of one of [`MAX_CONCURRENT`] existing objects.
    fn for_status(kind: &str, version: &str, number: usize, field: &SchemaField, value: Value) -> Self {
        let mut object = json!({ "status": valid_status(kind) });
        let path = set_at_path(&mut object, &field.root, &field.path, value);
        Self {
            version: version.to_owned(),
            name: status_target(kind, number),
            field: path.trim_start_matches('.').to_owned(),
            object,
        }
    }

    /// Returns the name of the object if it was accepted.
    ///
    /// # Errors
    /// A rejection that does not name the field.
    async fn apply(mut self, cluster: &Cluster, kind: &str) -> Result<Option<String>, String> {
        let objects = Objects::of_kruise(cluster, &self.version, kind);
        let done = if self.object["status"].is_null() && !is_of_node(kind) {
            self.object["metadata"] = json!({ "name": self.name });
            objects.create(&self.object).await
        } else {
            // There is one object, and its patches may conflict with each other.
            loop {
                let done = if self.object["status"].is_null() {
                    objects.merge(NODE, &self.object).await
                } else {
                    objects.merge_status(&self.name, &self.object).await
                };
                if !done
                    .as_ref()
                    .is_err_and(|error| error.contains("the object has been modified"))
                {
                    break done;
                }
            }
        };
        let Err(error) = done else {
            return Ok(Some(self.name));
        };
        // A value that is too deep or too long is not parsed, so the error cannot name the field.
        let unread = ["may be nested", "is too large", "larger than max"];
        if names_field(&error, &self.version, &self.field) || unread.iter().any(|text| error.contains(text)) {
            return Ok(None);
        }
        // The rest repeats it.
        let error = error.split(" (Status").next().unwrap_or_default();
        let error: String = error.chars().take(1000).collect();
        Err(format!("{} {}: {error}", self.version, self.field))
    }
}

/// Name of an object whose status is tried.
fn status_target(kind: &str, number: usize) -> String {
    match kind {
        kind if is_of_node(kind) => NODE.to_owned(),
        kind => format!("{}-status-{}", kind.to_lowercase(), number % MAX_CONCURRENT),
    }
}

/// The fields of `spec`, or `status`, in each version.
fn schema_fields(kind: &str, part: &str) -> Vec<(String, SchemaField)> {
    let crds = kruise_api::crds();
    let crd = crds.into_iter().find(|crd| crd.spec.names.kind == kind).unwrap();
    let crd = serde_json::to_value(crd).unwrap();
    let mut all = Vec::new();
    for version in crd["spec"]["versions"].as_array().unwrap() {
        let name = version["name"].as_str().unwrap();
        let mut fields = Vec::new();
        let root = Arc::new(version["schema"]["openAPIV3Schema"].clone());
        collect_fields(
            &root,
            &root["properties"][part],
            &[PathStep::Field(part.into())],
            &mut fields,
        );
        assert!(
            fields.len() > 2,
            "{part} of {kind} {name} has {} fields",
            fields.len()
        );
        all.extend(fields.into_iter().map(|field| (name.to_owned(), field)));
    }
    all
}

/// Runs all attempts; returns the names of the accepted objects.
pub async fn run_attempts(
    attempts: Vec<Attempt>,
    at_a_time: usize,
    admin: &Cluster,
    kind: &str,
) -> Vec<String> {
    let requests = stream::iter(attempts).map(|attempt| attempt.apply(admin, kind));
    let (mut accepted, mut unnamed) = (Vec::new(), Vec::new());
    let mut answers = requests.buffer_unordered(at_a_time);
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

/// The same in parts, after each of which the accepted objects of the part before are deleted: what the API server does
/// for a new SidecarSet grows with their number. Returns how many were accepted, and the names of those left.
pub async fn run_in_parts(
    mut attempts: Vec<Attempt>,
    at_a_time: usize,
    admin: &Cluster,
    kind: &str,
) -> (usize, Vec<String>) {
    let objects = Objects::of_kruise(admin, stored_version(kind), kind);
    let (mut count, mut left) = (0, Vec::new());
    while !attempts.is_empty() {
        let part = attempts.drain(..attempts.len().min(ATTEMPTS_IN_PART)).collect();
        let accepted = run_attempts(part, at_a_time, admin, kind).await;
        count += accepted.len();
        let before = std::mem::replace(&mut left, accepted);
        if !is_of_node(kind) {
            objects.delete_all(&before).await;
        }
    }
    (count, left)
}

/// Tries everything in every field of `spec`, and of `status`.
async fn try_all_fields(kind: &'static str) {
    let cluster = exclusive_cluster().await;
    let admin = &cluster.admin().await;
    if kind == "NodePodProbe" {
        // The daemon of the node has it, although the manager creates it only for nodes with probes.
        let object = json!({ "metadata": { "name": NODE }, "spec": valid_spec(kind, 0) });
        let objects = Objects::of_kruise(admin, stored_version(kind), kind);
        objects.create(&object).await.unwrap();
    }
    let (mut light, mut heavy) = (Vec::new(), Vec::new());
    let fields = schema_fields(kind, "spec");
    for (index, (version, field)) in fields.iter().enumerate() {
        let repeated = is_repeated(&fields, version, field);
        for (value_index, value) in malformed_values(&field.schema).into_iter().enumerate() {
            // The schema rejects all of another type, so two of them are enough for a field. What a field of another
            // version repeats is converted, whatever it is, so that each gets some of the values.
            let is_sampled = (index + value_index) % 3 == 0;
            if !is_sampled && (repeated || !has_type(&field.schema, &value)) {
                continue;
            }
            let is_large = value.as_i64().is_some_and(|number| number > 100);
            let mut attempt = Attempt::new(kind, version, light.len(), field, value);
            if is_large && field.path.last() == Some(&PathStep::Field("replicas".into())) {
                // Otherwise that many Pods would be created, one by one; the API server rejects Pods with such a class.
                attempt.object["spec"]["template"]["spec"]["priorityClassName"] = json!("missing");
            }
            light.push(attempt);
        }
        if is_text(&field.schema) && !repeated {
            let number = 1_000_000 + heavy.len();
            heavy.push(Attempt::new(
                kind,
                version,
                number,
                field,
                long_text(&field.schema),
            ));
        }
    }
    let count = light.len();
    let (accepted_count, mut accepted) = run_in_parts(light, max_concurrent(kind), admin, kind).await;
    assert!(
        accepted_count > 0 && accepted_count < count,
        "{accepted_count} of {count} were accepted"
    );
    accepted.extend(run_attempts(heavy, 1, admin, kind).await);
    accepted.extend(try_status_fields(kind, admin).await);
    cluster
        .assert_still_works(&format!("after-{}", kind.to_lowercase()))
        .await;
    // Cleans up for the next test.
    let objects = Objects::of_kruise(admin, stored_version(kind), kind);
    if is_of_node(kind) {
        // A status of a mebibyte would slow down all that follows.
        objects
            .merge_status(NODE, &json!({ "status": null }))
            .await
            .unwrap();
    }
    if kind == "NodeImage" {
        objects
            .merge(NODE, &json!({ "spec": { "images": null } }))
            .await
            .unwrap();
    }
    if is_of_node(kind) {
        return;
    }
    objects.delete_all(&accepted).await;
}

/// Tries everything in every field of `status`, on objects that both programs reconcile; returns their names.
async fn try_status_fields(kind: &'static str, admin: &Cluster) -> Vec<String> {
    let objects = Objects::of_kruise(admin, stored_version(kind), kind);
    let names: Vec<String> = (0..MAX_CONCURRENT)
        .map(|number| status_target(kind, number))
        .collect();
    if is_of_node(kind) {
        objects
            .merge(NODE, &json!({ "spec": valid_spec(kind, 0) }))
            .await
            .unwrap();
    } else {
        for (number, name) in names.iter().enumerate() {
            let object = json!({ "metadata": { "name": name }, "spec": valid_spec(kind, number) });
            objects.create(&object).await.unwrap();
        }
    }
    let (mut light, mut heavy) = (Vec::new(), Vec::new());
    let fields = schema_fields(kind, "status");
    for (index, (version, field)) in fields.iter().enumerate() {
        // Once is enough: the objects are the same, too.
        if is_repeated(&fields, version, field) {
            continue;
        }
        for (value_index, value) in malformed_values(&field.schema).into_iter().enumerate() {
            if !has_type(&field.schema, &value) && (index + value_index) % 3 != 0 {
                continue;
            }
            light.push(Attempt::for_status(kind, version, light.len(), field, value));
        }
        if is_text(&field.schema) {
            let text = long_text(&field.schema);
            heavy.push(Attempt::for_status(kind, version, heavy.len(), field, text));
        }
    }
    let count = light.len();
    let accepted = run_attempts(light, max_concurrent(kind), admin, kind).await.len();
    assert!(
        accepted > 0 && accepted < count,
        "{accepted} of {count} were accepted"
    );
    run_attempts(heavy, 1, admin, kind).await;
    if is_of_node(kind) { Vec::new() } else { names }
}

#[tokio::test]
async fn malformed_cloneset_fields_are_rejected_or_harmless() {
    try_all_fields("CloneSet").await;
}

#[tokio::test]
async fn malformed_job_fields_are_rejected_or_harmless() {
    try_all_fields("ImagePullJob").await;
}

#[tokio::test]
async fn malformed_recreate_request_fields_are_rejected_or_harmless() {
    try_all_fields("ContainerRecreateRequest").await;
}

#[tokio::test]
async fn malformed_node_image_fields_are_rejected_or_harmless() {
    try_all_fields("NodeImage").await;
}

#[tokio::test]
async fn malformed_image_list_fields_are_rejected_or_harmless() {
    try_all_fields("ImageListPullJob").await;
}

#[tokio::test]
async fn malformed_recreate_job_fields_are_rejected_or_harmless() {
    try_all_fields("ContainerRecreateJob").await;
}

#[tokio::test]
async fn malformed_pod_probe_marker_fields_are_rejected_or_harmless() {
    try_all_fields("PodProbeMarker").await;
}

#[tokio::test]
async fn malformed_node_pod_probe_fields_are_rejected_or_harmless() {
    try_all_fields("NodePodProbe").await;
}

#[tokio::test]
async fn malformed_sidecar_set_fields_are_rejected_or_harmless() {
    try_all_fields("SidecarSet").await;
}
