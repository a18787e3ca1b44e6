//! The CustomResourceDefinitions, made of the types, the rules and the columns below.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use super::rules::{self, Rule};
use super::{V1ALPHA1, V1BETA1, container_recreate_request, image_pull_job, keys, node_image, v1alpha1};

/// Name, type, JSON path and description of a printer column.
type Column = (&'static str, &'static str, &'static str, &'static str);

const AGE: Column = (
    "AGE",
    "date",
    ".metadata.creationTimestamp",
    "Time since creation",
);

const NODE_IMAGE_COLUMNS: &[Column] = &[
    ("DESIRED", "integer", ".status.desired", "Tags asked for"),
    ("PULLING", "integer", ".status.pulling", "Tags being pulled"),
    ("SUCCEED", "integer", ".status.succeeded", "Tags pulled"),
    ("FAILED", "integer", ".status.failed", "Tags given up"),
    AGE,
];

const IMAGE_PULL_JOB_COLUMNS: &[Column] = &[
    ("TOTAL", "integer", ".status.desired", "Nodes the job is for"),
    ("ACTIVE", "integer", ".status.active", "Nodes that pull"),
    (
        "SUCCEED",
        "integer",
        ".status.succeeded",
        "Nodes that have the image",
    ),
    ("FAILED", "integer", ".status.failed", "Nodes that gave up"),
    AGE,
    ("MESSAGE", "string", ".status.message", "How far the job is"),
];

const CONTAINER_RECREATE_REQUEST_COLUMNS: &[Column] = &[
    ("PHASE", "string", ".status.phase", "How far the request is"),
    ("POD", "string", ".spec.podName", "Name of the Pod"),
    (
        "NODE",
        "string",
        r".metadata.labels.crr\.apps\.kruise\.io/node-name",
        "Node of the Pod",
    ),
    AGE,
];

/// What a kind is made of.
struct Kind {
    beta: CustomResourceDefinition,
    alpha: CustomResourceDefinition,
    columns: &'static [Column],
    rules: &'static [Rule],
    /// Whether the versions differ in what they can say, so that the webhook must convert.
    differs: bool,
    /// Whether an object without `spec` is one that asks for nothing, rather than a mistake.
    spec_may_be_absent: bool,
}

/// The CustomResourceDefinitions of all kinds, as installed: both versions served, `v1beta1` stored.
///
/// There is no `caBundle`: the manager fills it in where it runs, and since the manifest never has the
/// field, applying the manifest again does not clear it.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let kinds = [
        Kind {
            beta: container_recreate_request::ContainerRecreateRequest::crd(),
            alpha: v1alpha1::ContainerRecreateRequest::crd(),
            columns: CONTAINER_RECREATE_REQUEST_COLUMNS,
            rules: rules::CONTAINER_RECREATE_REQUEST,
            differs: true,
            spec_may_be_absent: false,
        },
        Kind {
            beta: image_pull_job::ImagePullJob::crd(),
            alpha: v1alpha1::ImagePullJob::crd(),
            columns: IMAGE_PULL_JOB_COLUMNS,
            rules: rules::IMAGE_PULL_JOB,
            differs: false,
            spec_may_be_absent: false,
        },
        Kind {
            beta: node_image::NodeImage::crd(),
            alpha: v1alpha1::NodeImage::crd(),
            columns: NODE_IMAGE_COLUMNS,
            rules: rules::NODE_IMAGE,
            differs: true,
            spec_may_be_absent: true,
        },
    ];
    kinds
        .iter()
        .filter_map(|kind| serde_json::from_value(kind.definition()).ok())
        .collect()
}

impl Kind {
    fn definition(&self) -> Value {
        let names = &self.beta.spec.names;
        let mut spec = json!({
            "group": self.beta.spec.group,
            "scope": self.beta.spec.scope,
            "names": {
                "kind": names.kind,
                "listKind": format!("{}List", names.kind),
                "plural": names.plural,
                "singular": names.singular,
            },
            "versions": [self.version(&self.alpha, V1ALPHA1), self.version(&self.beta, V1BETA1)],
            "conversion": { "strategy": "None" },
        });
        if let Some(short) = names.short_names.as_ref().filter(|short| !short.is_empty()) {
            spec["names"]["shortNames"] = json!(short);
        }
        if self.differs {
            spec["conversion"] = json!({
                "strategy": "Webhook",
                "webhook": {
                    "conversionReviewVersions": ["v1"],
                    "clientConfig": { "service": {
                        "namespace": keys::SYSTEM_NAMESPACE,
                        "name": keys::WEBHOOK_SERVICE,
                        "path": keys::CONVERT_PATH,
                    } },
                },
            });
        }
        json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": { "name": self.beta.metadata.name },
            "spec": spec,
        })
    }

    fn version(&self, crd: &CustomResourceDefinition, name: &str) -> Value {
        let derived = crd
            .spec
            .versions
            .first()
            .and_then(|version| version.schema.as_ref());
        let mut schema = derived
            .and_then(|schema| serde_json::to_value(&schema.open_api_v3_schema).ok())
            .unwrap_or_default();
        tidy(&mut schema);
        self.complete_root(&mut schema);
        for rule in self.rules {
            apply(&mut schema, rule);
        }
        let columns = self
            .columns
            .iter()
            .filter(|(column, ..)| *column != "MESSAGE" || name == V1ALPHA1);
        let columns: Vec<_> = columns
            .map(|(name, type_, path, description)| {
                json!({ "name": name, "type": type_, "jsonPath": path, "description": description })
            })
            .collect();
        json!({
            "name": name,
            "served": true,
            "storage": name == V1BETA1,
            "schema": { "openAPIV3Schema": schema },
            "subresources": { "status": {} },
            "additionalPrinterColumns": columns,
        })
    }

    fn complete_root(&self, schema: &mut Value) {
        schema["properties"]["apiVersion"] =
            json!({ "type": "string", "description": "Group and version of this object." });
        schema["properties"]["kind"] = json!({ "type": "string", "description": "Kind of this object." });
        schema["properties"]["metadata"] = json!({ "type": "object" });
        if self.spec_may_be_absent {
            schema["properties"]["spec"]["default"] = json!({});
            if let Some(root) = schema.as_object_mut() {
                root.remove("required");
            }
        }
    }
}

/// Makes a derived schema the one meant: no nulls (absence says the same), and only the defaults that
/// this file and `schemas` put there on purpose, not those of Rust's empty values. A number or a string
/// is written the way Kubernetes' own tools do.
fn tidy(schema: &mut Value) {
    let Some(node) = schema.as_object_mut() else {
        return;
    };
    node.remove("nullable");
    if node.get("default").is_some_and(|default| *default != "TCP") {
        node.remove("default");
    }
    if let Some(Value::Array(words)) = node.get_mut("enum") {
        words.retain(|word| !word.is_null());
    }
    if node.get("x-kubernetes-int-or-string").is_some() {
        node.insert(
            "anyOf".into(),
            json!([{ "type": "integer" }, { "type": "string" }]),
        );
    }
    each_child(node, tidy);
}

/// Calls `with` for each schema directly below `node`.
fn each_child(node: &mut Map<String, Value>, mut with: impl FnMut(&mut Value)) {
    if let Some(Value::Object(properties)) = node.get_mut("properties") {
        properties.values_mut().for_each(&mut with);
    }
    for key in ["items", "additionalProperties"] {
        if let Some(child) = node.get_mut(key) {
            with(child);
        }
    }
}

/// Adds a rule where its path leads.
fn apply(schema: &mut Value, rule: &Rule) {
    let mut at = schema;
    for step in rule.path.split('.') {
        at = match step {
            "[]" => &mut at["items"],
            "{}" => &mut at["additionalProperties"],
            name => &mut at["properties"][name],
        };
    }
    let (Value::Object(node), Value::Object(additions)) = (at, (rule.add)()) else {
        return;
    };
    for (key, value) in additions {
        match (node.get_mut(&key), value) {
            (Some(Value::Array(there)), Value::Array(more)) if key.starts_with("x-") => there.extend(more),
            (_, value) => {
                node.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests;
