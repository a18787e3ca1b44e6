//! String enumerations that keep unknown values.
//!
//! Objects may have been written by other programs. An unknown value must neither break a watch nor be lost when a list
//! is written back, so every enumeration has `Other`.

/// Defines a string enumeration with `Other(String)` for unknown values.
///
/// `listed` puts the known values into the CRD schema as `enum`; `open` leaves a plain string there.
macro_rules! string_enum {
    ($mode:ident $(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
            /// A word that another program wrote; kept as it is.
            Other(String),
        }

        impl $name {
            /// The value as it is on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                    Self::Other(word) => word,
                }
            }
        }

        impl From<&str> for $name {
            fn from(word: &str) -> Self {
                match word {
                    $(stringify!($variant) => Self::$variant,)+
                    other => Self::Other(other.to_owned()),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                Ok(Self::from(String::deserialize(from)?.as_str()))
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                string_enum!(@schema $mode $($variant)+)
            }
        }
    };
    (@schema listed $($variant:ident)+) => {
        schemars::json_schema!({ "type": "string", "enum": [$(stringify!($variant)),+] })
    };
    (@schema open $($variant:ident)+) => {
        schemars::json_schema!({ "type": "string" })
    };
}

pub(crate) use string_enum;
