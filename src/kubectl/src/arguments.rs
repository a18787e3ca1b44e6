//! Values of arguments: only what may become part of a request.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kruise_api::image_reference::ImageReference;
use kruise_api::names;
use kruise_api::node_image::MAX_PIN_SECONDS;
use kruise_api::validation::labels::{label_value_errors, qualified_name_errors};

/// What a command is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A Pod.
    Pod(String),
    /// A CloneSet.
    CloneSet(String),
    /// A SidecarSet.
    SidecarSet(String),
}

/// A name of an object.
pub fn object_name(text: &str) -> Result<String, String> {
    let valid = names::is_subdomain(text).then(|| text.to_owned());
    valid.ok_or_else(|| format!("invalid name {text:?}: {}", names::SUBDOMAIN))
}

/// A name of a namespace.
pub fn namespace(text: &str) -> Result<String, String> {
    let valid = names::is_label(text).then(|| text.to_owned());
    valid.ok_or_else(|| format!("invalid namespace {text:?}: {}", names::LABEL))
}

/// A name of a container.
pub fn container_name(text: &str) -> Result<String, String> {
    let valid = names::is_label(text).then(|| text.to_owned());
    valid.ok_or_else(|| format!("invalid container name {text:?}: {}", names::LABEL))
}

/// A number of nodes, or a percentage of them; not 0, which would never end.
pub fn parallelism(text: &str) -> Result<IntOrString, String> {
    let (digits, max) = text
        .strip_suffix('%')
        .map_or((text, i32::MAX), |digits| (digits, 100));
    let number = digits
        .parse()
        .ok()
        .filter(|number: &i32| (1..=max).contains(number));
    let Some(number) = number else {
        return Err("expected a number of nodes from 1, or a percentage from 1% to 100%".to_owned());
    };
    Ok(if digits.len() == text.len() {
        IntOrString::Int(number)
    } else {
        IntOrString::String(format!("{number}%"))
    })
}

/// An image reference, as it was written.
pub fn image(text: &str) -> Result<String, String> {
    match ImageReference::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(why) => Err(why.to_string()),
    }
}

/// `TYPE/NAME`; a name alone is a Pod.
pub fn target(text: &str) -> Result<Target, String> {
    let Some((kind, name)) = text.split_once('/') else {
        return object_name(text).map(Target::Pod);
    };
    let make = match kind.to_ascii_lowercase().as_str() {
        "pod" | "pods" | "po" => Target::Pod,
        "clone" | "cloneset" | "clonesets" | "cloneset.apps.kruise.io" | "clonesets.apps.kruise.io" => {
            Target::CloneSet
        }
        "sidecarset" | "sidecarsets" | "sidecarset.apps.kruise.io" | "sidecarsets.apps.kruise.io" => {
            Target::SidecarSet
        }
        _ => {
            return Err(format!(
                "unknown type {kind:?}: expected pod, clone or sidecarset"
            ));
        }
    };
    object_name(name).map(make)
}

/// A CloneSet or a SidecarSet.
pub fn workload(text: &str) -> Result<Target, String> {
    match target(text)? {
        Target::Pod(_) => Err(format!("{text:?}: expected clone/NAME or sidecarset/NAME")),
        target => Ok(target),
    }
}

/// Labels as `KEY=VALUE,…`.
pub fn labels(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut labels = BTreeMap::new();
    for pair in text.split(',') {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| format!("{pair:?}: expected KEY=VALUE"))?;
        let value = value.strip_prefix('=').unwrap_or(value);
        if let Some(why) = qualified_name_errors(key).first() {
            return Err(format!("label {key:?}: {why}"));
        }
        if let Some(why) = label_value_errors(value).first() {
            return Err(format!("value {value:?} of label {key:?}: {why}"));
        }
        if labels.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(format!("label {key:?} is given twice"));
        }
    }
    Ok(labels)
}

/// A span such as `90s` or `1h30m`; 0 is no limit.
pub fn duration(text: &str) -> Result<Duration, String> {
    let parsed: SignedDuration = match text.trim() {
        "0" => SignedDuration::ZERO,
        text => text
            .parse()
            .map_err(|_| "expected a duration such as 30s, 10m or 1h30m")?,
    };
    Duration::try_from(parsed).map_err(|_| "must not be negative".to_owned())
}

/// A span of whole seconds during which an image is pinned.
pub fn pin(text: &str) -> Result<i32, String> {
    let seconds = i32::try_from(duration(text)?.as_secs()).unwrap_or(i32::MAX);
    if !(1..=MAX_PIN_SECONDS).contains(&seconds) {
        return Err(format!("must be from 1s to {}h", MAX_PIN_SECONDS / 3600));
    }
    Ok(seconds)
}

/// Text as an argument of a command that a shell reads.
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parallelism_is_a_number_or_a_percentage() {
        assert_eq!(parallelism("5"), Ok(IntOrString::Int(5)));
        assert_eq!(parallelism("100%"), Ok(IntOrString::String("100%".into())));
        for invalid in ["", "0", "0%", "101%", "%", "-1", "2147483648", "1.5", "5 %"] {
            assert!(parallelism(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn targets_are_parsed() {
        assert_eq!(target("web-1"), Ok(Target::Pod("web-1".into())));
        assert_eq!(target("pod/web-1"), Ok(Target::Pod("web-1".into())));
        for kind in ["clone", "cloneset", "CloneSets", "clonesets.apps.kruise.io"] {
            assert_eq!(
                workload(&format!("{kind}/web")),
                Ok(Target::CloneSet("web".into())),
                "{kind}"
            );
        }
        assert_eq!(workload("sidecarset/log"), Ok(Target::SidecarSet("log".into())));
        for invalid in [
            "",
            "/",
            "clone/",
            "clone/a/b",
            "clone/../a",
            "deployment/a",
            "a b",
            "a\u{1b}",
        ] {
            assert!(target(invalid).is_err(), "{invalid:?}");
        }
        assert!(workload("web").is_err());
    }

    #[test]
    fn labels_are_validated() {
        let parsed = labels("disk=ssd,example.com/zone==a,empty=").unwrap();
        assert_eq!(parsed["disk"], "ssd");
        assert_eq!((&*parsed["example.com/zone"], &*parsed["empty"]), ("a", ""));
        for invalid in ["", "a", "a=b,", "a=b,a=c", "a b=c", "a=b c", "a=\u{1b}", "=x"] {
            assert!(labels(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn durations_are_parsed() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        for invalid in ["", "-1s", "x", "10"] {
            assert!(duration(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn pins_are_whole_seconds_up_to_thirty_days() {
        assert_eq!(pin("90s"), Ok(90));
        assert_eq!(pin("720h"), Ok(MAX_PIN_SECONDS));
        for invalid in ["0", "500ms", "721h", "999999999999h", "-1s", "1"] {
            assert!(pin(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn shell_words_are_quoted_if_needed() {
        assert_eq!(
            shell_word("kubernetes-admin@kubernetes"),
            "kubernetes-admin@kubernetes"
        );
        assert_eq!(shell_word("my cluster"), "'my cluster'");
        assert_eq!(shell_word("it's; rm"), r"'it'\''s; rm'");
        assert_eq!(shell_word(""), "''");
    }

    proptest! {
        /// Whatever a user gives: a name that is accepted can be part of a path.
        #[test]
        fn accepted_names_are_path_segments(text in ".*") {
            let is_segment = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c));
            if let Ok(Target::Pod(name) | Target::CloneSet(name) | Target::SidecarSet(name)) = target(&text) {
                prop_assert!(is_segment(&name) && name != "." && name != "..");
            }
        }
    }
}
